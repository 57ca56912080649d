//! Traces, read one line at a time.
//!
//! | form | told by | a line |
//! | --- | --- | --- |
//! | Mooncake's, and our own | the file begins with `{` | a JSON object: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`; `priority` |
//! | Azure's | header with `ContextTokens`, `GeneratedTokens` | `TIMESTAMP` as `2023-11-16 18:15:46.680590`, tokens |
//! | BurstGPT's | header with `Request tokens`, `Response tokens` | `Timestamp` in s, tokens |
//!
//! Each of `hash_ids` stands for 512 tokens, the last one for what is left of `input_length`; equal ids
//! are equal texts. Where there are none, prompts share nothing. Sources: the traces published with
//! "Mooncake: Trading More Storage for Less Computation", FAST 2025; Azure's LLM inference traces of
//! 2023 ("Splitwise", ISCA 2024); "BurstGPT", 2024.

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
pub struct Trace<R = BufReader<File>> {
    reader: R,
    file: TraceFile,
    /// Known from the first line on.
    form: Option<Form>,
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

#[derive(Clone, Debug)]
enum Form {
    Json,
    Csv(Csv),
}

/// Where the columns stand in a CSV file.
#[derive(Clone, Debug)]
struct Csv {
    columns: usize,
    time: usize,
    input: usize,
    output: usize,
    /// The file tells dates; this is the first, ms.
    dates: bool,
    first_ms: Option<f64>,
}

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    /// `None`: the prompt shares nothing with any other.
    #[serde(default)]
    hash_ids: Option<Vec<u64>>,
    #[serde(default)]
    priority: i32,
}

impl Csv {
    /// What a header says, if it is a known one.
    fn of_header(header: &str) -> Option<Csv> {
        let names: Vec<String> = header
            .trim_start_matches('\u{feff}')
            .split(',')
            .map(|name| name.trim().to_ascii_lowercase())
            .collect();
        let at = |name: &str| names.iter().position(|n| n == name);
        let azure = at("contexttokens").zip(at("generatedtokens"));
        let burst = at("request tokens").zip(at("response tokens"));
        let (input, output) = azure.or(burst)?;
        Some(Csv {
            columns: names.len(),
            time: at("timestamp")?,
            input,
            output,
            dates: azure.is_some(),
            first_ms: None,
        })
    }

    fn parse(&mut self, line: &str) -> Result<Line, String> {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        if fields.len() != self.columns {
            return Err(format!(
                "{} fields, but the header has {}",
                fields.len(),
                self.columns
            ));
        }
        let tokens = |at: usize| {
            fields[at].parse::<u32>().map_err(|_| {
                format!(
                    "\"{}\" is no number of tokens (column {})",
                    fields[at],
                    at + 1
                )
            })
        };
        let (input_length, output_length) = (tokens(self.input)?, tokens(self.output)?);
        let time = fields[self.time];
        let ms = if self.dates {
            date_ms(time).ok_or_else(|| {
                format!("\"{time}\" is no time such as 2023-11-16 18:15:46.680590")
            })?
        } else {
            let seconds: f64 = time
                .parse()
                .map_err(|_| format!("\"{time}\" is no number of seconds"))?;
            seconds * 1e3
        };
        // Traces begin at their first request, whatever the clock said then.
        let first = *self.first_ms.get_or_insert(ms);
        Ok(Line {
            timestamp: ms - first,
            input_length,
            output_length,
            hash_ids: None,
            priority: 0,
        })
    }
}

/// `YYYY-MM-DD HH:MM:SS[.fraction]` as ms since 1970, whatever the zone.
fn date_ms(text: &str) -> Option<f64> {
    let (date, time) = text.split_once([' ', 'T'])?;
    let time = time.trim_end_matches('Z').split('+').next()?;
    let mut date = date.splitn(3, '-').map(str::parse::<i64>);
    let (year, month, day) = (date.next()?.ok()?, date.next()?.ok()?, date.next()?.ok()?);
    let mut time = time.splitn(3, ':');
    let (hour, minute) = (
        time.next()?.parse::<u32>().ok()?,
        time.next()?.parse::<u32>().ok()?,
    );
    let second: f64 = time.next()?.parse().ok()?;
    let sound = (1970..=9999).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && (0.0..61.0).contains(&second);
    if !sound {
        return None;
    }
    // Days since 1970-01-01, counting years from March so that the leap day comes last.
    let (y, m) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let days = 365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day - 1 - 719_468;
    let minutes = days as f64 * 1440.0 + f64::from(hour * 60 + minute);
    Some(minutes * 60e3 + second * 1e3)
}

impl Trace {
    pub(crate) fn open(
        workload: &Workload,
        file: &TraceFile,
        salt: u64,
    ) -> Result<Self, SourceError> {
        let reader = File::open(&file.path).map_err(|source| SourceError::Io {
            path: file.path.clone(),
            source,
        })?;
        Ok(Trace::new(BufReader::new(reader), workload, file, salt))
    }
}

impl<R: BufRead> Trace<R> {
    /// Reads a trace from `reader`; `file` names it in errors.
    pub fn new(reader: R, workload: &Workload, file: &TraceFile, salt: u64) -> Trace<R> {
        Trace {
            reader,
            file: file.clone(),
            form: None,
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

    /// The buffer's line as a request's parts, or what is wrong with it; `None` for a header.
    fn parse(&mut self) -> Result<Option<Line>, String> {
        if self.buffer.starts_with(b"\0") {
            return Err(format!("longer than {LINE_BYTES_MAX} bytes"));
        }
        let line = match &mut self.form {
            Some(Form::Json) => parse_json(&self.buffer)?,
            Some(Form::Csv(csv)) => {
                let text = std::str::from_utf8(&self.buffer).map_err(|e| e.to_string())?;
                csv.parse(text.trim_end())?
            }
            None if self.buffer.trim_ascii_start().starts_with(b"{") => {
                self.form = Some(Form::Json);
                parse_json(&self.buffer)?
            }
            None => {
                let text = String::from_utf8_lossy(&self.buffer);
                let csv = Csv::of_header(text.trim_end()).ok_or(
                    "neither a JSON object nor a header that is known (`TIMESTAMP,ContextTokens,\
                     GeneratedTokens` or `Timestamp,Model,Request tokens,Response tokens,…`)",
                )?;
                self.form = Some(Form::Csv(csv));
                return Ok(None);
            }
        };
        if line.input_length == 0 {
            return Err("`input_length` is 0; a prompt has at least one token".into());
        }
        if let Some(ids) = &line.hash_ids {
            let per_id = u64::from(self.file.tokens_per_id);
            let needed = u64::from(line.input_length).div_ceil(per_id);
            if ids.len() as u64 != needed {
                return Err(format!(
                    "`input_length` {} takes {needed} ids of {per_id} tokens, but `hash_ids` has {}",
                    line.input_length,
                    ids.len()
                ));
            }
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
        Ok(Some(line))
    }

    fn request(&mut self, line: &Line) -> Option<Request> {
        self.last_ms = line.timestamp;
        let due = self.arrivals.next(Some(line.timestamp))?;
        let session = self.session;
        self.session += 1;
        self.left -= 1;
        let per_id = self.file.tokens_per_id;
        let text = |name: u64, tokens: u32| Segment {
            content: Content::Text(name),
            tokens,
            role: Role::User,
        };
        let prompt = match &line.hash_ids {
            Some(ids) => PromptSource::new(ids.iter().zip(0u32..).map(|(id, i)| {
                let tokens = per_id.min(line.input_length - per_id * i);
                text(draw(self.texts.bits(0), *id), tokens)
            })),
            // A text of its own.
            None => PromptSource::new([text(draw(self.texts.bits(1), session), line.input_length)]),
        };
        Some(Request {
            session,
            turn: 0,
            turns: 1,
            due,
            prompt,
            output_len: line.output_length,
            ignore_eos: true,
            priority: line.priority,
            class: 0,
        })
    }
}

fn parse_json(bytes: &[u8]) -> Result<Line, String> {
    serde_json::from_slice(bytes).map_err(|e| {
        // serde says "line 1" of the one line that it sees; only the column helps.
        let text = e.to_string();
        let text = text.split(" at line ").next().unwrap_or_default();
        format!("{text} (column {})", e.column())
    })
}

impl<R: BufRead> Iterator for Trace<R> {
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
                Ok(None) => {}
                Ok(Some(line)) => return self.request(&line).map(Ok),
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
        let mut trace = Trace::new(text.as_bytes(), &workload, &file, 0);
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
    fn a_line_without_ids_shares_nothing_and_may_have_a_priority() {
        let line = r#"{"timestamp": 0, "input_length": 40, "output_length": 5, "priority": -3}"#;
        let (requests, _) = check(&format!("{line}\n{line}\n"), OnBadLine::Stop);
        let requests: Vec<_> = requests.into_iter().map(Result::unwrap).collect();
        assert_eq!(requests[0].priority, -3);
        assert_eq!(requests[0].prompt.tokens(), 40);
        assert_ne!(requests[0].prompt, requests[1].prompt);
    }

    #[test]
    fn azures_and_burst_gpts_tables_are_read() {
        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n\
                     2023-11-16 23:59:59.5000000,374,44\r\n2023-11-17 00:00:01.0000000,396,109\r\n";
        let burst = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
                     5,ChatGPT,374,44,418,Conversation log\n6.5,GPT-4,396,109,505,API log\n";
        for text in [azure, burst] {
            let (requests, _) = check(text, OnBadLine::Stop);
            let got: Vec<_> = requests
                .iter()
                .map(|r| r.as_ref().unwrap())
                .map(|r| (r.due.0, r.prompt.tokens(), r.output_len))
                .collect();
            // 1.5 s apart, at time scale 10.
            assert_eq!(got, [(0, 374, 44), (150_000_000, 396, 109)]);
        }
        for (bad, says) in [
            ("2023-11-16 24:00:00,1,1", "no time such as"),
            ("2023-13-16 23:00:00,1,1", "no time such as"),
            ("yesterday,1,1", "no time such as"),
            ("2023-11-16 23:00:00,x,1", "no number of tokens (column 2)"),
            ("2023-11-16 23:00:00,1", "2 fields, but the header has 3"),
            ("2023-11-16 23:00:00,1,0", "`output_length` is 0"),
        ] {
            let text = format!("TIMESTAMP,ContextTokens,GeneratedTokens\n{bad}\n");
            let (requests, _) = check(&text, OnBadLine::Stop);
            let error = requests[0].as_ref().unwrap_err();
            assert!(error.contains("line 2") && error.contains(says), "{error}");
        }
        let (requests, _) = check("a,b,c\n1,2,3\n", OnBadLine::Stop);
        let error = requests[0].as_ref().unwrap_err();
        assert!(
            error.contains("line 1") && error.contains("header"),
            "{error}"
        );
    }

    #[test]
    fn dates_are_days_apart() {
        let ms = |text: &str| date_ms(text).unwrap();
        assert_eq!(ms("1970-01-01 00:00:00"), 0.0);
        assert_eq!(ms("2000-03-01T00:00:00Z"), 951_868_800_000.0);
        assert_eq!(
            ms("2024-03-01 00:00:00") - ms("2024-02-28 00:00:00"),
            2.0 * 86_400e3
        );
        assert_eq!(
            ms("2023-03-01 00:00:00") - ms("2023-02-28 00:00:00"),
            86_400e3
        );
        // A double counts ms of this century to a quarter of a µs.
        let fraction = ms("2023-11-16 18:15:46.6805900+00:00") % 1e3;
        assert!((fraction - 680.59).abs() < 1e-3, "{fraction}");
    }

    #[test]
    fn a_line_without_end_is_bounded() {
        let text = format!("{}\n{GOOD}", "x".repeat(LINE_BYTES_MAX as usize + 100));
        let (requests, skipped) = check(&text, OnBadLine::Skip);
        assert_eq!((requests.len(), skipped), (1, 1));
    }
}
