//! Parquet as the CSV that it stands for, so that both formats have one reader and one set of rules.

use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::record::reader::RowIter;

/// The file as CSV, or the error.
pub(super) fn as_csv(bytes: Vec<u8>) -> Result<Vec<u8>, String> {
    // The crate's decoders assert what a sound file holds; a damaged one must not end the process.
    catch_unwind(AssertUnwindSafe(|| convert(bytes.into())))
        .unwrap_or_else(|_| Err("the file is damaged; write it again".to_owned()))
}

fn convert(bytes: Bytes) -> Result<Vec<u8>, String> {
    let refused = |error: &dyn std::fmt::Display| format!("not readable as Parquet: {error}");
    let file = SerializedFileReader::new(bytes).map_err(|e| refused(&e))?;
    let schema = file.metadata().file_metadata().schema_descr();
    let mut csv = csv::Writer::from_writer(Vec::new());
    csv.write_record(schema.columns().iter().map(|column| column.name()))
        .map_err(|e| refused(&e))?;
    let mut line = Vec::new();
    for row in RowIter::from_file_into(Box::new(file)) {
        let row = row.map_err(|e| refused(&e))?;
        line.clear();
        line.extend(row.get_column_iter().map(|(_, field)| match field {
            Field::Null => String::new(),
            // `Field` shows these with an exponent or rounded; Rust's own form reads back exactly.
            Field::Float(x) => x.to_string(),
            Field::Double(x) => x.to_string(),
            Field::Str(text) => text.clone(),
            other => other.to_string(),
        }));
        csv.write_record(&line).map_err(|e| refused(&e))?;
    }
    csv.into_inner().map_err(|e| refused(&e))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parquet::data_type::{DoubleType, Int32Type};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    use super::super::{Table, TableError};

    /// Decode sequences against step times, with one of each optional column left out.
    fn file(sequences: &[i32], step_us: &[f64]) -> Vec<u8> {
        let schema = "message grid { required int32 decode_sequences; required double step_us; }";
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let properties = Arc::new(WriterProperties::default());
        let mut writer = SerializedFileWriter::new(Vec::new(), schema, properties).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let typed = column.typed::<Int32Type>();
        typed.write_batch(sequences, None, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let typed = column.typed::<DoubleType>();
        typed.write_batch(step_us, None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
        writer.into_inner().unwrap()
    }

    #[test]
    fn both_formats_give_the_same_table() {
        let bytes = file(&[1, 64], &[6_100.25, 1e7 / 3.0]);
        let csv = format!("decode_sequences,step_us\n1,6100.25\n64,{}\n", 1e7 / 3.0);
        assert_eq!(
            Table::parse_parquet("g.parquet", bytes).unwrap(),
            Table::parse("g.csv", csv.as_bytes()).unwrap()
        );
    }

    #[test]
    fn the_rules_of_the_grid_hold() {
        let error = Table::parse_parquet("g.parquet", file(&[1, 1], &[2.0, 3.0])).unwrap_err();
        assert_eq!(
            error.to_string(),
            "g.parquet:3: this pass stands on line 2 already"
        );
    }

    #[test]
    fn damaged_files_are_refused_or_read_and_never_panic() {
        let whole = file(&[1, 64, 128], &[1.0, 2.0, 3.0]);
        for len in 0..whole.len() {
            let error = Table::parse_parquet("g.parquet", whole[..len].to_vec()).unwrap_err();
            assert!(matches!(error, TableError::Parquet { .. }), "cut at {len}");
        }
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut bytes = whole.clone();
                bytes[at] ^= 1 << bit;
                let _ = Table::parse_parquet("g.parquet", bytes);
            }
        }
    }
}
