"""Reports on runs: one HTML page about one or several runs, and samples in the terminal.

The package reads run folders (`tracking.run_record`) and writes only the page. `curves` reduces metrics to a bounded
number of points. `samples` selects and shortens samples. `page` writes the HTML with `page.css` and `page.js`. `browse`
shows samples in the terminal. Texts of a run are never interpreted as HTML or terminal commands.
"""
