//! The drag record: one row a request, with the moment of each hand-over.
//!
//! The columns are the same for a live run, a simulated one and a real engine's logs; what nobody
//! looked at is empty. Times are nanoseconds of `CLOCK_MONOTONIC` on one host (simulated: since
//! the run's start).

use std::io::{Read, Write};

use slipstream_base::{Stage, StageTimes};

/// Where cached blocks of a prompt came from.
pub const TIERS: [&str; 4] = ["device", "host", "disk", "peer"];

/// One request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DragRecord {
    /// Names the request across runs: a workload's `session.turn`, or the server's request id.
    pub id: String,
    /// When it passed each stage.
    pub times: StageTimes,
    /// The worker that answered (the last one, after a retry).
    pub worker: Option<u32>,
    /// Prompt length, tokens.
    pub isl: Option<u32>,
    /// Answer length, tokens.
    pub osl: Option<u32>,
    /// Prompt blocks found cached, by tier in the order of [`TIERS`].
    pub hit_blocks: [Option<u32>; TIERS.len()],
    /// Times that the engine preempted it.
    pub preemptions: Option<u32>,
    /// Times that it was sent again.
    pub retries: Option<u32>,
    /// `ok`, or the kind of error.
    pub status: String,
}

/// Why drag records could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum DragError {
    /// The file or pipe failed. May be retried; what was written before stands.
    #[error("drag records: {0}")]
    Csv(#[from] csv::Error),
    /// The file or pipe failed on flush.
    #[error("drag records: {0}")]
    Io(#[from] std::io::Error),
    /// A column that is always there is missing: not a drag file.
    #[error(
        "the file has no column `{0}`; drag records are CSV files with one header line, as `slipstream bench --drag FILE` writes them"
    )]
    NoColumn(&'static str),
    /// A field does not hold a number.
    #[error(
        "line {line}: column `{column}` holds {found:?}, not a whole number; leave it empty where the value is not known"
    )]
    NotANumber {
        /// Line in the file, from 1.
        line: u64,
        /// Column name.
        column: String,
        /// What the field holds.
        found: String,
    },
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

/// Writes records as CSV, one at a time.
pub struct DragWriter<W: Write> {
    csv: csv::Writer<W>,
    row: csv::StringRecord,
    number: String,
}

impl<W: Write> DragWriter<W> {
    /// Writes the header line.
    ///
    /// # Errors
    /// [`DragError::Csv`] if `sink` fails.
    pub fn new(sink: W) -> Result<Self, DragError> {
        let mut csv = csv::Writer::from_writer(sink);
        csv.write_record(columns())?;
        Ok(DragWriter {
            csv,
            row: csv::StringRecord::new(),
            number: String::new(),
        })
    }

    /// Writes one row.
    ///
    /// # Errors
    /// [`DragError::Csv`] if the sink fails.
    pub fn write(&mut self, record: &DragRecord) -> Result<(), DragError> {
        self.row.clear();
        self.row.push_field(&record.id);
        for stage in Stage::ALL {
            self.push_number(record.times.at(stage));
        }
        for value in [record.worker, record.isl, record.osl] {
            self.push_number(value.map(u64::from));
        }
        for value in record.hit_blocks {
            self.push_number(value.map(u64::from));
        }
        for value in [record.preemptions, record.retries] {
            self.push_number(value.map(u64::from));
        }
        self.row.push_field(&record.status);
        self.csv.write_record(&self.row)?;
        Ok(())
    }

    fn push_number(&mut self, value: Option<u64>) {
        use std::fmt::Write as _;
        self.number.clear();
        if let Some(value) = value {
            write!(self.number, "{value}").expect("a String takes every write");
        }
        self.row.push_field(&self.number);
    }

    /// Flushes, and gives the sink back.
    ///
    /// # Errors
    /// [`DragError::Io`] if the last rows could not be written.
    pub fn finish(self) -> Result<W, DragError> {
        self.csv
            .into_inner()
            .map_err(|e| DragError::Io(e.into_error()))
    }

    /// Hands buffered rows to the sink.
    ///
    /// # Errors
    /// [`DragError::Io`] if the sink fails.
    pub fn flush(&mut self) -> Result<(), DragError> {
        Ok(self.csv.flush()?)
    }
}

/// Reads records from CSV: an iterator with one row in memory.
///
/// Columns may come in any order, and unknown ones are ignored; `id` and `status` must be there.
pub struct DragReader<R: Read> {
    csv: csv::Reader<R>,
    row: csv::StringRecord,
    /// Field index of each known column, in the order of [`columns`].
    at: Vec<Option<usize>>,
    names: Vec<String>,
}

impl<R: Read> DragReader<R> {
    /// Reads the header line.
    ///
    /// # Errors
    /// [`DragError::NoColumn`] if it is not a drag file, [`DragError::Csv`] if `source` fails.
    pub fn new(source: R) -> Result<Self, DragError> {
        let mut csv = csv::Reader::from_reader(source);
        let header = csv.headers()?.clone();
        let names = columns();
        let at: Vec<_> = names
            .iter()
            .map(|name| header.iter().position(|h| h == name))
            .collect();
        for must in ["id", "status"] {
            if !header.iter().any(|h| h == must) {
                return Err(DragError::NoColumn(must));
            }
        }
        Ok(DragReader {
            csv,
            row: csv::StringRecord::new(),
            at,
            names,
        })
    }

    fn text(&self, column: usize) -> &str {
        self.at[column]
            .and_then(|i| self.row.get(i))
            .unwrap_or_default()
    }

    fn number<N: std::str::FromStr>(&self, column: usize) -> Result<Option<N>, DragError> {
        let text = self.text(column);
        if text.is_empty() {
            return Ok(None);
        }
        text.parse().map(Some).map_err(|_| DragError::NotANumber {
            line: self.row.position().map_or(0, csv::Position::line),
            column: self.names[column].clone(),
            found: text.to_owned(),
        })
    }

    fn record(&self) -> Result<DragRecord, DragError> {
        let mut record = DragRecord {
            id: self.text(0).to_owned(),
            ..DragRecord::default()
        };
        for (i, stage) in Stage::ALL.into_iter().enumerate() {
            if let Some(ns) = self.number(1 + i)? {
                record.times.note(stage, ns);
            }
        }
        let mut column = 1 + Stage::ALL.len();
        let mut next = || {
            column += 1;
            self.number(column - 1)
        };
        record.worker = next()?;
        record.isl = next()?;
        record.osl = next()?;
        for slot in &mut record.hit_blocks {
            *slot = next()?;
        }
        record.preemptions = next()?;
        record.retries = next()?;
        self.text(column).clone_into(&mut record.status);
        Ok(record)
    }
}

impl<R: Read> Iterator for DragReader<R> {
    type Item = Result<DragRecord, DragError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.csv.read_record(&mut self.row) {
            Ok(true) => Some(self.record()),
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
            prop::collection::vec(prop::option::of(1u64..), 15),
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
            let mut writer = DragWriter::new(Vec::new()).unwrap();
            for record in &records {
                writer.write(record).unwrap();
            }
            let bytes = writer.finish().unwrap();
            let back: Vec<_> = DragReader::new(&bytes[..]).unwrap().map(Result::unwrap).collect();
            prop_assert_eq!(back, records);
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
    fn another_csv_file_is_refused() {
        assert!(read("a,b\n1,2\n").unwrap_err().contains("no column `id`"));
    }

    #[test]
    fn a_row_cut_short_is_an_error() {
        assert!(read("id,due,status\n1,5\n").is_err());
    }
}
