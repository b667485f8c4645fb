"""Messages of the training service: JSON bodies, protobuf, sequences and losses."""
