//! The drag record: one row per request, with the time of each stage. Drag: the time that a request
//! spends between GPU steps.
//!
//! The columns are the same for a live run, a simulated one and a real engine's logs; stages that
//! were not recorded are empty. Times are nanoseconds of `CLOCK_MONOTONIC` on one host (simulated:
//! since the run's start). Files are CSV or, with the feature `parquet`, Parquet.

use std::borrow::Cow;
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::Path;

use slipstream_base::{Stage, StageTimes};

use crate::record::{Cell, Column, ColumnType, RecordError, RecordWriter, is_parquet};

/// Tiers that cached blocks of a prompt come from.
pub const TIERS: [&str; 4] = ["device", "host", "disk", "peer"];

/// One request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DragRecord {
    /// Identifies the request across runs: a workload's `session.turn`, or the server's request id.
    pub id: String,
    /// When it reached each stage.
    pub times: StageTimes,
    /// The worker that answered (the last one, after a retry).
    pub worker: Option<u32>,
    /// Prompt length, tokens.
    pub isl: Option<u32>,
    /// Answer length, tokens.
    pub osl: Option<u32>,
    /// Prompt blocks found cached, by tier in the order of [`TIERS`].
    pub hit_blocks: [Option<u32>; TIERS.len()],
    /// Number of times that the engine preempted it.
    pub preemptions: Option<u32>,
    /// Number of retries.
    pub retries: Option<u32>,
    /// `ok`, or the category of error.
    pub status: String,
}

/// Why drag records could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum DragError {
    /// The file or pipe failed, or its content is not in the format of its name.
    #[error(transparent)]
    File(#[from] RecordError),
    /// A mandatory column is missing: not a drag file.
    #[error(
        "the file has no column `{0}`; drag records have one row per request, as written by `slipstream bench --drag FILE`"
    )]
    NoColumn(&'static str),
    /// A field is not a number.
    #[error(
        "{at}: column `{column}` holds {found:?}, not a whole number of its range; leave it empty if the value is not known"
    )]
    NotANumber {
        /// `line 3` of a CSV file, `row 2` of a Parquet one.
        at: String,
        /// Column name.
        column: String,
        /// Content of the field.
        found: String,
    },
}

impl From<csv::Error> for DragError {
    fn from(error: csv::Error) -> Self {
        DragError::File(error.into())
    }
}

/// Names of the columns in order.
pub fn columns() -> Vec<String> {
    let mut names = vec!["id".to_owned()];
    names.extend(Stage::ALL.iter().map(|s| s.name().to_owned()));
    names.extend(["worker", "isl", "osl"].map(str::to_owned));
    names.extend(TIERS.iter().map(|tier| format!("hit_blocks_{tier}")));
    names.extend(["preemptions", "retries", "status"].map(str::to_owned));
    names
}

/// Columns that are text and mandatory; the others are numbers, and may be absent.
const TEXTS: [&str; 2] = ["id", "status"];

fn typed_columns() -> Vec<Column> {
    columns()
        .into_iter()
        .map(|name| {
            let text = TEXTS.contains(&name.as_str());
            Column::new(
                name,
                if text {
                    ColumnType::Text
                } else {
                    ColumnType::U64
                },
            )
        })
        .collect()
}

/// Writes records, one at a time.
pub struct DragWriter<W: Write + Send> {
    file: RecordWriter<W>,
}

impl DragWriter<BufWriter<File>> {
    /// Creates (or empties) the file; Parquet if its name ends in `.parquet`, else CSV.
    ///
    /// # Errors
    /// [`DragError::File`] if it cannot be created, or if Parquet is not built in.
    pub fn create(path: &Path) -> Result<Self, DragError> {
        Ok(DragWriter {
            file: RecordWriter::create(path, &typed_columns())?,
        })
    }
}

impl<W: Write + Send> DragWriter<W> {
    /// Writes CSV, beginning with the header line.
    ///
    /// # Errors
    /// [`DragError::File`] if `sink` fails.
    pub fn new(sink: W) -> Result<Self, DragError> {
        Ok(DragWriter {
            file: RecordWriter::csv(sink, &typed_columns())?,
        })
    }

    /// Writes one row.
    ///
    /// # Errors
    /// [`DragError::File`] if the sink fails.
    pub fn write(&mut self, record: &DragRecord) -> Result<(), DragError> {
        let mut row: Vec<Cell<'_>> = vec![Cell::Text(&record.id)];
        row.extend(Stage::ALL.iter().map(|s| Cell::from(record.times.at(*s))));
        row.extend([record.worker, record.isl, record.osl].map(Cell::from));
        row.extend(record.hit_blocks.map(Cell::from));
        row.extend([record.preemptions, record.retries].map(Cell::from));
        row.push(Cell::Text(&record.status));
        Ok(self.file.write(&row)?)
    }

    /// Completes the file. No rows may follow.
    ///
    /// # Errors
    /// [`DragError::File`] if the last rows could not be written.
    pub fn finish(&mut self) -> Result<(), DragError> {
        Ok(self.file.finish()?)
    }
}

/// Records of a file, read one at a time.
pub type DragRows = Box<dyn Iterator<Item = Result<DragRecord, DragError>>>;

/// Reads the records of a file; Parquet if its name ends in `.parquet`, else CSV.
///
/// Columns may come in any order, and unknown ones are ignored; `id` and `status` must be there.
///
/// # Errors
/// [`DragError::File`] if it cannot be read, [`DragError::NoColumn`] if it is no drag file.
pub fn read(path: &Path) -> Result<DragRows, DragError> {
    let file = File::open(path).map_err(RecordError::from)?;
    if !is_parquet(path) {
        return Ok(Box::new(DragReader::new(file)?));
    }
    #[cfg(feature = "parquet")]
    {
        parquet_rows(file)
    }
    #[cfg(not(feature = "parquet"))]
    {
        Err(RecordError::NoParquet.into())
    }
}

#[cfg(feature = "parquet")]
fn parquet_rows(file: File) -> Result<DragRows, DragError> {
    use crate::record::{Value, read_parquet};

    let (header, rows) = read_parquet(file).map_err(RecordError::from)?;
    let layout = Layout::new(&header.iter().map(String::as_str))?;
    Ok(Box::new(rows.enumerate().map(move |(at, row)| {
        let row = row.map_err(RecordError::from)?;
        let text = |field: usize| match row.get(field) {
            None | Some(Value::Absent) => String::new(),
            Some(Value::U64(n)) => n.to_string(),
            Some(Value::F64(x)) => x.to_string(),
            Some(Value::Text(text)) => text.clone(),
        };
        layout.record(|field| text(field).into(), || format!("row {}", at + 1))
    })))
}

/// Positions of the columns in a file.
struct Layout {
    /// Field of each known column, in the order of [`columns`].
    fields: Vec<Option<usize>>,
    names: Vec<String>,
}

impl Layout {
    fn new<'a>(header: &(impl Iterator<Item = &'a str> + Clone)) -> Result<Layout, DragError> {
        let names = columns();
        let fields: Vec<_> = names
            .iter()
            .map(|name| header.clone().position(|h| h == name))
            .collect();
        for must in TEXTS {
            if !header.clone().any(|h| h == must) {
                return Err(DragError::NoColumn(must));
            }
        }
        Ok(Layout { fields, names })
    }

    /// The record with the fields of `text`, empty if absent; `at` is its position for errors.
    fn record<'a>(
        &self,
        text: impl Fn(usize) -> Cow<'a, str>,
        at: impl Fn() -> String,
    ) -> Result<DragRecord, DragError> {
        let column = |column: usize| self.fields[column].map_or(Cow::Borrowed(""), &text);
        let number = |index: usize| {
            let text = column(index);
            if text.is_empty() {
                return Ok(None);
            }
            text.parse::<u64>()
                .map(Some)
                .map_err(|_| self.not_a_number(index, &text, at()))
        };
        let mut record = DragRecord {
            id: column(0).into_owned(),
            ..DragRecord::default()
        };
        for (i, stage) in Stage::ALL.into_iter().enumerate() {
            if let Some(ns) = number(1 + i)? {
                record.times.note(stage, ns);
            }
        }
        let mut index = 1 + Stage::ALL.len();
        let mut next = || {
            index += 1;
            let wide = number(index - 1)?;
            wide.map(u32::try_from)
                .transpose()
                .map_err(|_| self.not_a_number(index - 1, &column(index - 1), at()))
        };
        record.worker = next()?;
        record.isl = next()?;
        record.osl = next()?;
        for slot in &mut record.hit_blocks {
            *slot = next()?;
        }
        record.preemptions = next()?;
        record.retries = next()?;
        record.status = column(index).into_owned();
        Ok(record)
    }

    fn not_a_number(&self, column: usize, found: &str, at: String) -> DragError {
        DragError::NotANumber {
            at,
            column: self.names[column].clone(),
            found: found.to_owned(),
        }
    }
}

/// Reads records from CSV: an iterator with one row in memory. [`read`] opens a file of either
/// format.
pub struct DragReader<R: Read> {
    csv: csv::Reader<R>,
    row: csv::StringRecord,
    layout: Layout,
}

impl<R: Read> DragReader<R> {
    /// Reads the header line.
    ///
    /// # Errors
    /// [`DragError::NoColumn`] if it is not a drag file, [`DragError::File`] if `source` fails.
    pub fn new(source: R) -> Result<Self, DragError> {
        let mut csv = csv::Reader::from_reader(source);
        let layout = Layout::new(&csv.headers()?.iter())?;
        Ok(DragReader {
            csv,
            row: csv::StringRecord::new(),
            layout,
        })
    }
}

impl<R: Read> Iterator for DragReader<R> {
    type Item = Result<DragRecord, DragError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.csv.read_record(&mut self.row) {
            Ok(true) => {
                let line = || self.row.position().map_or(0, csv::Position::line);
                Some(self.layout.record(
                    |field| self.row.get(field).unwrap_or_default().into(),
                    || format!("line {}", line()),
                ))
            }
            Ok(false) => None,
            Err(error) => Some(Err(error.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(text: &str) -> Result<Vec<DragRecord>, String> {
        DragReader::new(text.as_bytes())
            .and_then(Iterator::collect)
            .map_err(|e| e.to_string())
    }

    fn any_record() -> impl Strategy<Value = DragRecord> {
        let n = || prop::option::of(any::<u32>());
        (
            "[a-z0-9.,\" ]{1,12}",
            prop::collection::vec(prop::option::of(1u64..), Stage::ALL.len()),
            (n(), n(), n(), [n(), n(), n(), n()], n(), n()),
            "[a-z_ ]{1,12}",
        )
            .prop_map(
                |(id, times, (worker, isl, osl, hit_blocks, p, r), status)| {
                    let mut record = DragRecord {
                        id,
                        worker,
                        isl,
                        osl,
                        hit_blocks,
                        preemptions: p,
                        retries: r,
                        status,
                        ..DragRecord::default()
                    };
                    for (stage, ns) in Stage::ALL.into_iter().zip(times) {
                        if let Some(ns) = ns {
                            record.times.note(stage, ns);
                        }
                    }
                    record
                },
            )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn what_is_written_is_read(records in prop::collection::vec(any_record(), 0..8)) {
            let dir = tempfile::tempdir().unwrap();
            let formats: &[&str] = if cfg!(feature = "parquet") { &["csv", "parquet"] } else { &["csv"] };
            for format in formats {
                let path = dir.path().join("drag").with_extension(format);
                let mut writer = DragWriter::create(&path).unwrap();
                for record in &records {
                    writer.write(record).unwrap();
                }
                writer.finish().unwrap();
                let back: Vec<_> = super::read(&path).unwrap().map(Result::unwrap).collect();
                prop_assert_eq!(&back, &records, "{}", format);
            }
        }
    }

    #[test]
    fn columns_in_another_order_and_absent_ones_are_fine() {
        let records = read("status,client_recv,id,extra\nok,12,7.0,x\n").unwrap();
        assert_eq!(records[0].id, "7.0");
        assert_eq!(records[0].times.at(Stage::ClientRecv), Some(12));
        assert_eq!(records[0].times.at(Stage::Due), None);
        assert_eq!(records[0].isl, None);
    }

    #[test]
    fn a_field_that_is_no_number_is_named_with_its_line() {
        let error = read("id,due,status\n1,5,ok\n2,soon,ok\n").unwrap_err();
        assert!(error.contains("line 3"), "{error}");
        assert!(
            error.contains("`due`") && error.contains("\"soon\""),
            "{error}"
        );
    }

    #[test]
    fn a_number_beyond_its_range_is_refused() {
        let error = read("id,worker,status\n1,4294967296,ok\n").unwrap_err();
        assert!(error.contains("`worker`"), "{error}");
    }

    #[cfg(not(feature = "parquet"))]
    #[test]
    fn parquet_in_a_build_without_says_how_to_get_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("drag.parquet");
        let error = DragWriter::create(&path).err().unwrap().to_string();
        assert!(error.contains("--features parquet"), "{error}");
        assert!(!path.exists(), "no empty file is left");
    }

    #[cfg(feature = "parquet")]
    #[test]
    fn a_file_that_is_no_parquet_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("drag.parquet");
        std::fs::write(&path, "id,status\n1,ok\n").unwrap();
        let error = super::read(&path).err().unwrap().to_string();
        assert!(error.contains("Parquet"), "{error}");
        let mut writer = DragWriter::create(&path).unwrap();
        writer.write(&DragRecord::default()).unwrap();
        writer.finish().unwrap();
        let whole = std::fs::read(&path).unwrap();
        for len in 0..whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            assert!(super::read(&path).is_err(), "cut at {len}");
        }
    }

    #[test]
    fn another_csv_file_is_refused() {
        assert!(read("a,b\n1,2\n").unwrap_err().contains("no column `id`"));
    }

    #[test]
    fn a_row_cut_short_is_an_error() {
        assert!(read("id,due,status\n1,5\n").is_err());
    }
}
