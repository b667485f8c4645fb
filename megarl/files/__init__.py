"""Files: atomic writes (`atomic`), strict JSON (`strict_json`), model folders (`model_folder`), the Hub's cache
(`hub`).

Names written by users: import paths (`import_path`), and the nearest known name to an unknown one (`nearest`).
"""
