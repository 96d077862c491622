"""SQLite: records in, records and npz out. Knows no model and no tokenizer."""
