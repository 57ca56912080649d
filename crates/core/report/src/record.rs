//! Files of records: rows under named, typed columns, as CSV or (feature `parquet`) as Parquet.
//!
//! The format follows from the file's name, so that every command that writes records offers both
//! with one flag. Rows are written one at a time; memory does not grow with the file.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use crate::partial::Partial;

#[cfg(feature = "parquet")]
mod parquet;

/// Type of a column's values. Every value may be absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnType {
    /// Whole numbers from 0.
    U64,
    /// Numbers.
    F64,
    /// Text.
    Text,
}

/// A column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// Its name, unique in the file.
    pub name: String,
    /// Its type.
    pub kind: ColumnType,
}

impl Column {
    /// A column of this name and type.
    pub fn new(name: impl Into<String>, kind: ColumnType) -> Column {
        Column {
            name: name.into(),
            kind,
        }
    }
}

/// One value of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cell<'a> {
    /// Not known, or not recorded.
    Absent,
    /// For a column of [`ColumnType::U64`].
    U64(u64),
    /// For a column of [`ColumnType::F64`].
    F64(f64),
    /// For a column of [`ColumnType::Text`].
    Text(&'a str),
}

impl From<Option<u64>> for Cell<'_> {
    fn from(value: Option<u64>) -> Self {
        value.map_or(Cell::Absent, Cell::U64)
    }
}

impl From<Option<u32>> for Cell<'_> {
    fn from(value: Option<u32>) -> Self {
        value.map_or(Cell::Absent, |n| Cell::U64(n.into()))
    }
}

impl From<Option<f64>> for Cell<'_> {
    fn from(value: Option<f64>) -> Self {
        value.map_or(Cell::Absent, Cell::F64)
    }
}

/// Why records could not be written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file or pipe failed. The content of a CSV file remains; a Parquet file is unreadable.
    #[error(transparent)]
    Csv(#[from] csv::Error),
    /// As [`RecordError::Csv`].
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The file could not be written or read as Parquet.
    #[cfg(feature = "parquet")]
    #[error(transparent)]
    Parquet(#[from] ::parquet::errors::ParquetError),
    /// This binary has no Parquet.
    #[error(
        "this `slipstream` was built without Parquet; use a .csv file, or build with \
         `cargo build --release --features parquet`"
    )]
    NoParquet,
}

/// Whether `path` names a Parquet file.
pub fn is_parquet(path: &Path) -> bool {
    path.extension()
        .is_some_and(|ending| ending.eq_ignore_ascii_case("parquet"))
}

/// Whether this binary can write the format of the name `path`.
///
/// # Errors
/// [`RecordError::NoParquet`] if not.
pub fn check_format(path: &Path) -> Result<(), RecordError> {
    if is_parquet(path) && cfg!(not(feature = "parquet")) {
        return Err(RecordError::NoParquet);
    }
    Ok(())
}

/// Writes records, one at a time.
pub struct RecordWriter<W: Write + Send> {
    kinds: Vec<ColumnType>,
    format: Format<W>,
    partial: Option<Partial>,
}

enum Format<W: Write + Send> {
    Csv {
        csv: csv::Writer<W>,
        row: csv::StringRecord,
        field: String,
    },
    #[cfg(feature = "parquet")]
    Parquet(parquet::Writer<W>),
}

impl RecordWriter<BufWriter<File>> {
    /// Creates the file; Parquet if its name ends in `.parquet`, else CSV. It is called
    /// `NAME.partial` until [`finish`](Self::finish).
    ///
    /// # Errors
    /// [`RecordError`] if the file cannot be created or is to be Parquet in a build without.
    pub fn create(path: &Path, columns: &[Column]) -> Result<Self, RecordError> {
        check_format(path)?;
        let (file, partial) = Partial::create(path)?;
        let sink = BufWriter::new(file);
        #[cfg(feature = "parquet")]
        let writer = if is_parquet(path) {
            RecordWriter::parquet(sink, columns)
        } else {
            RecordWriter::csv(sink, columns)
        };
        #[cfg(not(feature = "parquet"))]
        let writer = RecordWriter::csv(sink, columns);
        Ok(RecordWriter {
            partial: Some(partial),
            ..writer?
        })
    }
}

impl<W: Write + Send> RecordWriter<W> {
    /// Writes CSV: a header line, then one line per row, absent values empty.
    ///
    /// # Errors
    /// [`RecordError::Csv`] if `sink` fails.
    pub fn csv(sink: W, columns: &[Column]) -> Result<Self, RecordError> {
        let mut csv = csv::Writer::from_writer(sink);
        csv.write_record(columns.iter().map(|column| &column.name))?;
        Ok(RecordWriter {
            kinds: columns.iter().map(|column| column.kind).collect(),
            format: Format::Csv {
                csv,
                row: csv::StringRecord::new(),
                field: String::new(),
            },
            partial: None,
        })
    }

    /// Writes Parquet: optional columns, Snappy, row groups of 65,536 rows.
    ///
    /// # Errors
    /// [`RecordError::Parquet`] if `sink` fails.
    #[cfg(feature = "parquet")]
    pub fn parquet(sink: W, columns: &[Column]) -> Result<Self, RecordError> {
        Ok(RecordWriter {
            kinds: columns.iter().map(|column| column.kind).collect(),
            format: Format::Parquet(parquet::Writer::new(sink, columns)?),
            partial: None,
        })
    }

    /// Writes one row. Shape of `row`: one cell per column, in order.
    ///
    /// # Errors
    /// [`RecordError`] if the sink fails.
    ///
    /// # Panics
    /// If a cell is not of its column's type, or there are more or fewer of them.
    pub fn write(&mut self, row: &[Cell<'_>]) -> Result<(), RecordError> {
        assert_eq!(row.len(), self.kinds.len(), "one cell per column");
        for (cell, kind) in row.iter().zip(&self.kinds) {
            let fits = match cell {
                Cell::Absent => true,
                Cell::U64(_) => *kind == ColumnType::U64,
                Cell::F64(_) => *kind == ColumnType::F64,
                Cell::Text(_) => *kind == ColumnType::Text,
            };
            assert!(fits, "{cell:?} in a column of {kind:?}");
        }
        match &mut self.format {
            Format::Csv {
                csv,
                row: line,
                field,
            } => {
                line.clear();
                for cell in row {
                    field.clear();
                    match cell {
                        Cell::Absent => Ok(()),
                        Cell::U64(n) => write!(field, "{n}"),
                        Cell::F64(x) => write!(field, "{x}"),
                        Cell::Text(text) => field.write_str(text),
                    }
                    .expect("a String takes every write");
                    line.push_field(field);
                }
                csv.write_record(&*line)?;
            }
            #[cfg(feature = "parquet")]
            Format::Parquet(writer) => writer.write(row)?,
        }
        Ok(())
    }

    /// Completes the file. No rows may follow.
    ///
    /// # Errors
    /// [`RecordError`] if the last rows (or Parquet's directory) could not be written.
    pub fn finish(&mut self) -> Result<(), RecordError> {
        match &mut self.format {
            Format::Csv { csv, .. } => csv.flush()?,
            #[cfg(feature = "parquet")]
            Format::Parquet(writer) => writer.finish()?,
        }
        if let Some(partial) = &mut self.partial {
            partial.complete()?;
        }
        Ok(())
    }
}

#[cfg(feature = "parquet")]
pub(crate) use parquet::read as read_parquet;

/// A value read from a file.
#[cfg(feature = "parquet")]
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Absent,
    U64(u64),
    F64(f64),
    Text(String),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::partial::save_text;

    #[test]
    fn a_file_has_its_name_once_it_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let (path, partial) = (dir.path().join("r.csv"), dir.path().join("r.csv.partial"));
        std::fs::write(&path, "of an earlier run").unwrap();
        let columns = [Column::new("n", ColumnType::U64)];
        let mut file = RecordWriter::create(&path, &columns).unwrap();
        file.write(&[Cell::U64(5)]).unwrap();
        assert!(partial.exists());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "of an earlier run");
        file.finish().unwrap();
        assert!(!partial.exists());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "n\n5\n");
        save_text(&path, "a page").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a page");
        assert!(!partial.exists());
    }

    #[test]
    fn a_full_disk_is_an_error() {
        let full = Path::new("/dev/full");
        if !full.exists() {
            eprintln!("skipped: there is no /dev/full");
            return;
        }
        let mut file = RecordWriter::create(full, &[Column::new("n", ColumnType::U64)]).unwrap();
        file.write(&[Cell::U64(5)]).unwrap(); // into the buffer
        assert!(file.finish().unwrap_err().to_string().contains("No space"));
        assert!(save_text(full, "x").is_err());
    }
}
