"""Reports on runs: one HTML page of one or several runs, and samples in the terminal.

Reads run folders and writes only the page. `recorded` reads a folder, including incomplete and damaged ones. `curves`
reduces its metrics to a bounded number of points. `samples` selects and shortens samples. `page` writes the HTML with
`page.css` and `page.js`. `browse` shows samples in the terminal. Texts of a run are never interpreted as HTML or
terminal commands. Imports no torch.
"""
