"""Sources of data: files, compressed files and data sets of the Hub, read to rows."""
