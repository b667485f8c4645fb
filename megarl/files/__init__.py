"""Files: written whole or not at all (`atomic`), JSON read strictly (`strict_json`), model folders (`model_folder`)."""
