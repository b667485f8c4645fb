"""Files: written whole or not at all (`atomic`), JSON read strictly (`strict_json`), model folders (`model_folder`).

Names that a user wrote: import paths (`import_path`), the nearest known name to one that is not known (`nearest`).
"""
