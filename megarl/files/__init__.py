"""Files: atomic writes (`atomic`), strict JSON (`strict_json`), model folders (`model_folder`), the Hub's cache
(`hub`), import paths (`import_path`), and the known name nearest to an unknown one (`nearest`).
"""
