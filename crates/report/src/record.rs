//! Files of records: rows under named, typed columns, as CSV or (feature `parquet`) as Parquet.
//!
//! The format follows from the file's name, so that every command that writes records offers both
//! by one flag. A row is written at a time; what is kept in memory does not grow with the file.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

#[cfg(feature = "parquet")]
mod parquet;

/// What a column holds. Every value may be absent.
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
    /// What it holds.
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
    /// Not known, or not looked at.
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
    /// The file or pipe failed. What a CSV file held before stands; a Parquet file is unreadable.
    #[error("{0}")]
    Csv(#[from] csv::Error),
    /// As [`RecordError::Csv`].
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The file could not be written or read as Parquet.
    #[cfg(feature = "parquet")]
    #[error("{0}")]
    Parquet(#[from] ::parquet::errors::ParquetError),
    /// This binary has no Parquet.
    #[error(
        "this `slipstream` was built without Parquet; name a .csv file, or build with \
         `cargo build --release --features parquet`"
    )]
    NoParquet,
}

/// Whether `path` names a Parquet file.
pub fn is_parquet(path: &Path) -> bool {
    path.extension()
        .is_some_and(|ending| ending.eq_ignore_ascii_case("parquet"))
}

/// Writes records, one at a time.
pub struct RecordWriter<W: Write + Send> {
    kinds: Vec<ColumnType>,
    format: Format<W>,
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
    /// Creates (or empties) the file; Parquet if its name ends in `.parquet`, else CSV.
    ///
    /// # Errors
    /// [`RecordError`] if the file cannot be created or is to be Parquet in a build without.
    pub fn create(path: &Path, columns: &[Column]) -> Result<Self, RecordError> {
        if !is_parquet(path) {
            return RecordWriter::csv(BufWriter::new(File::create(path)?), columns);
        }
        #[cfg(feature = "parquet")]
        {
            RecordWriter::parquet(BufWriter::new(File::create(path)?), columns)
        }
        #[cfg(not(feature = "parquet"))]
        {
            Err(RecordError::NoParquet)
        }
    }
}

impl<W: Write + Send> RecordWriter<W> {
    /// Writes CSV: a header line, then a line a row, absent values empty.
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
        })
    }

    /// Writes one row. Shape of `row`: a cell a column, in order.
    ///
    /// # Errors
    /// [`RecordError`] if the sink fails.
    ///
    /// # Panics
    /// If a cell is not of its column's type, or there are more or fewer of them.
    pub fn write(&mut self, row: &[Cell<'_>]) -> Result<(), RecordError> {
        assert_eq!(row.len(), self.kinds.len(), "a cell a column");
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

    /// Completes the file. Rows cannot follow.
    ///
    /// # Errors
    /// [`RecordError`] if the last rows (or Parquet's directory) could not be written.
    pub fn finish(&mut self) -> Result<(), RecordError> {
        match &mut self.format {
            Format::Csv { csv, .. } => csv.flush()?,
            #[cfg(feature = "parquet")]
            Format::Parquet(writer) => writer.finish()?,
        }
        Ok(())
    }
}

#[cfg(feature = "parquet")]
pub(crate) use parquet::read as read_parquet;

/// A value read back.
#[cfg(feature = "parquet")]
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Absent,
    U64(u64),
    F64(f64),
    Text(String),
}
