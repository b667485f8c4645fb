"""Seeing a run: one HTML page of one or several runs, and samples in the terminal.

Reads run folders and writes nothing into them but the page. `recorded` reads a folder, whatever it lacks or has broken;
`curves` thins its metrics out; `samples` chooses and shortens what is shown of its samples; `page` writes the HTML with
`page.css` and `page.js`; `browse` shows samples in the terminal. Nothing of a run's texts is taken for HTML or for the
terminal's commands. Known without torch.
"""
