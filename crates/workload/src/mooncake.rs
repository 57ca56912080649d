//! Traces in Mooncake's form: one JSON object a line, read one at a time.
//!
//! `timestamp` is in ms; each of `hash_ids` stands for 512 tokens, the last one for what is left of
//! `input_length`; equal ids are equal texts. Source: the traces published with "Mooncake: Trading
//! More Storage for Less Computation", FAST 2025.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};

use serde::Deserialize;
use slipstream_base::mix::draw;
use slipstream_base::workload_file::{OnBadLine, TraceFile, Workload};

use crate::draw::Stream;
use crate::generate::Arrivals;
use crate::prompt::{Content, PromptSource, Role, Segment};
use crate::source::{Request, SourceError};

/// Longest line read, bytes: a prompt of 100 million tokens. A longer one is bad.
const LINE_BYTES_MAX: u64 = 4 << 20;

/// A trace, read as a stream.
#[derive(Debug)]
pub struct Mooncake<R = BufReader<File>> {
    reader: R,
    file: TraceFile,
    arrivals: Arrivals,
    texts: Stream,
    line: u64,
    buffer: Vec<u8>,
    last_ms: f64,
    session: u64,
    left: u64,
    skipped: u64,
    failed: bool,
}

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

impl Mooncake {
    pub(crate) fn open(
        workload: &Workload,
        file: &TraceFile,
        salt: u64,
    ) -> Result<Self, SourceError> {
        let reader = File::open(&file.path).map_err(|source| SourceError::Io {
            path: file.path.clone(),
            source,
        })?;
        Ok(Mooncake::new(BufReader::new(reader), workload, file, salt))
    }
}

impl<R: BufRead> Mooncake<R> {
    /// Reads a trace from `reader`; `file` names it in errors.
    pub fn new(reader: R, workload: &Workload, file: &TraceFile, salt: u64) -> Mooncake<R> {
        Mooncake {
            reader,
            file: file.clone(),
            arrivals: Arrivals::new(workload, salt),
            texts: Stream::named(workload.seed ^ salt, "trace"),
            line: 0,
            buffer: Vec::new(),
            last_ms: 0.0,
            session: 0,
            left: workload.requests.unwrap_or(u64::MAX),
            skipped: 0,
            failed: false,
        }
    }

    /// Bad lines skipped so far.
    pub fn skipped_lines(&self) -> u64 {
        self.skipped
    }

    /// Reads a line into the buffer; `false` at the end of the file.
    fn read_line(&mut self) -> std::io::Result<bool> {
        self.buffer.clear();
        self.line += 1;
        let read = (&mut self.reader)
            .take(LINE_BYTES_MAX)
            .read_until(b'\n', &mut self.buffer)?;
        if read as u64 == LINE_BYTES_MAX && self.buffer.last() != Some(&b'\n') {
            // Read on to the line's end without keeping it.
            self.buffer.clear();
            self.buffer.extend_from_slice(b"\0too long");
            while !self.reader.fill_buf()?.is_empty() {
                let chunk = self.reader.fill_buf()?;
                let end = chunk.iter().position(|b| *b == b'\n');
                let used = end.map_or(chunk.len(), |at| at + 1);
                self.reader.consume(used);
                if end.is_some() {
                    break;
                }
            }
        }
        Ok(read > 0)
    }

    /// The buffer's line as a request's parts, or what is wrong with it.
    fn parse(&self) -> Result<Line, String> {
        if self.buffer.starts_with(b"\0") {
            return Err(format!("longer than {LINE_BYTES_MAX} bytes"));
        }
        let line: Line = serde_json::from_slice(&self.buffer).map_err(|e| {
            // serde says "line 1" of the one line that it sees; only the column helps.
            let text = e.to_string();
            let text = text.split(" at line ").next().unwrap_or_default();
            format!("{text} (column {})", e.column())
        })?;
        let per_id = u64::from(self.file.tokens_per_id);
        let ids = line.hash_ids.len() as u64;
        let needed = u64::from(line.input_length).div_ceil(per_id);
        if line.input_length == 0 {
            return Err("`input_length` is 0; a prompt has at least one token".into());
        }
        if ids != needed {
            return Err(format!(
                "`input_length` {} takes {needed} ids of {per_id} tokens, but `hash_ids` has {ids}",
                line.input_length
            ));
        }
        if line.output_length == 0 {
            return Err("`output_length` is 0; an answer has at least one token".into());
        }
        if !line.timestamp.is_finite() || line.timestamp < self.last_ms {
            return Err(format!(
                "`timestamp` {} is before the line above it ({}); sort the trace by time",
                line.timestamp, self.last_ms
            ));
        }
        Ok(line)
    }

    fn request(&mut self, line: &Line) -> Option<Request> {
        self.last_ms = line.timestamp;
        let due = self.arrivals.next(Some(line.timestamp))?;
        let session = self.session;
        self.session += 1;
        self.left -= 1;
        let per_id = self.file.tokens_per_id;
        let last = line.hash_ids.len() - 1;
        let segments = line.hash_ids.iter().enumerate().map(|(i, id)| Segment {
            content: Content::Text(draw(self.texts.bits(0), *id)),
            tokens: if i == last {
                line.input_length - per_id * last as u32
            } else {
                per_id
            },
            role: Role::User,
        });
        Some(Request {
            session,
            turn: 0,
            turns: 1,
            due,
            prompt: PromptSource::new(segments),
            output_len: line.output_length,
            ignore_eos: true,
            priority: 0,
            class: 0,
        })
    }
}

impl<R: BufRead> Iterator for Mooncake<R> {
    type Item = Result<Request, SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.left > 0 && !self.failed {
            match self.read_line() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(source) => {
                    self.failed = true;
                    return Some(Err(SourceError::Io {
                        path: self.file.path.clone(),
                        source,
                    }));
                }
            }
            if self.buffer.trim_ascii().is_empty() {
                continue;
            }
            match self.parse() {
                Ok(line) => return self.request(&line).map(Ok),
                Err(_) if self.file.on_bad_line == OnBadLine::Skip => self.skipped += 1,
                Err(what) => {
                    self.failed = true;
                    return Some(Err(SourceError::BadLine {
                        path: self.file.path.clone(),
                        line: self.line,
                        what,
                    }));
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slipstream_base::workload_file::{self, Arrival};

    fn check(text: &str, on_bad_line: OnBadLine) -> (Vec<Result<Request, String>>, u64) {
        let file = TraceFile {
            path: "t.jsonl".into(),
            on_bad_line,
            tokens_per_id: 512,
        };
        let workload = Workload {
            seed: 0,
            requests: None,
            duration_s: None,
            time_scale: 10.0,
            arrival: Arrival::Trace,
            content: workload_file::Content::Trace(file.clone()),
        };
        let mut trace = Mooncake::new(text.as_bytes(), &workload, &file, 0);
        let requests = trace
            .by_ref()
            .map(|r| r.map_err(|e| e.to_string()))
            .collect();
        (requests, trace.skipped_lines())
    }

    const GOOD: &str =
        r#"{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}"#;

    #[test]
    fn a_line_is_a_request_and_the_last_id_is_partial() {
        let (requests, _) = check(GOOD, OnBadLine::Stop);
        let request = requests[0].as_ref().unwrap();
        assert_eq!(request.due, SimTime::from_secs_f64(0.1)); // 1 s at time scale 10
        let lengths: Vec<u32> = request.prompt.segments().iter().map(|s| s.tokens).collect();
        assert_eq!((lengths, request.output_len), (vec![512, 88], 5));
    }
    use slipstream_base::SimTime;

    #[test]
    fn equal_ids_are_equal_texts() {
        let text = format!("{GOOD}\n{}", GOOD.replace("[7, 8]", "[7, 9]"));
        let (requests, _) = check(&text, OnBadLine::Stop);
        let s = |i: usize| requests[i].as_ref().unwrap().prompt.segments().to_vec();
        assert_eq!(s(0)[0], s(1)[0]);
        assert_ne!(s(0)[1], s(1)[1]);
    }

    #[test]
    fn a_bad_line_is_named_by_number() {
        for (bad, says) in [
            (&GOOD[..40], "column"), // cut short
            (&GOOD.replace("600", "-1"), "invalid value"),
            (&GOOD.replace("600", "0"), "`input_length` is 0"),
            (&GOOD.replace("[7, 8]", "[7]"), "takes 2 ids"),
            (&GOOD.replace("5,", "0,"), "`output_length` is 0"),
            (&GOOD.replace("1000", "10"), "sort the trace"),
            (
                &GOOD.replace("output_length", "x"),
                "missing field `output_length`",
            ),
        ] {
            let text = format!("{GOOD}\n\n{bad}\n{GOOD}\n");
            let (requests, _) = check(&text, OnBadLine::Stop);
            assert_eq!(requests.len(), 2, "nothing follows the bad line");
            let error = requests[1].as_ref().unwrap_err();
            assert!(error.contains("line 3") && error.contains(says), "{error}");
            let (requests, skipped) = check(&text, OnBadLine::Skip);
            assert!(requests.iter().all(Result::is_ok), "{requests:?}");
            assert_eq!((requests.len(), skipped), (2, 1));
        }
    }

    #[test]
    fn a_line_without_end_is_bounded() {
        let text = format!("{}\n{GOOD}", "x".repeat(LINE_BYTES_MAX as usize + 100));
        let (requests, skipped) = check(&text, OnBadLine::Skip);
        assert_eq!((requests.len(), skipped), (1, 1));
    }
}
