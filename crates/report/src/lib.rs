//! Percentiles, tables, JSON, Parquet and the drag record.
