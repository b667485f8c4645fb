"""Reports on runs: one HTML page about one or several runs, and samples in the terminal.

The package reads run folders and writes only the page. `recorded` reads a folder, even if files are missing or damaged.
`curves` reduces its metrics to a bounded number of points. `samples` selects and shortens samples. `page` writes the
HTML with `page.css` and `page.js`. `browse` shows samples in the terminal. Texts of a run are never interpreted as HTML
or terminal commands.
"""
