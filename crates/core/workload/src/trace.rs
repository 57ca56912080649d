//! Traces, read one line at a time.
//!
//! | format | recognized by | a line |
//! | --- | --- | --- |
//! | Mooncake's | the first object has `timestamp` or `input_length` | a JSON object: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`; `session_id`, `delay` (ms), `priority` |
//! | Qwen-Bailian's | the first object has `chat_id` or `parent_chat_id` | as Mooncake's with times in s and 16 tokens per id; `chat_id` and `parent_chat_id` make sessions |
//! | our own ([`own`](crate::own)) | the first object has `turns` | a JSON object: a session |
//! | a record of `serve --record` | the first object has `slipstream_record` | as Mooncake's, in any order, in one file or a folder of them |
//! | Azure's | header with `ContextTokens`, `GeneratedTokens` | `TIMESTAMP` as `2023-11-16 18:15:46.680590`, tokens |
//! | BurstGPT's | header with `Request tokens`, `Response tokens` | `Timestamp` in s, tokens |
//! | others | the fields that `columns` names | JSON objects or CSV; numbers are times in `unit` |
//!
//! Lines of Mooncake's format that name a session are its turns: the first has a `timestamp`, the
//! others a `delay` after the previous answer (or a `timestamp` as their earliest time). If the
//! first line names a session, the whole file is read at once, since turns may be anywhere.
//!
//! `model` of a line (`Model` of BurstGPT's, of our own format for a whole session) is the name of its model. It is read if
//! several models are served ([`Workload::served_models`]), and else has no meaning. A session has that of its first turn.
//!
//! Each of `hash_ids` stands for 512 tokens, the last one for the rest of `input_length`; equal ids
//! are equal texts. Without ids, prompts share nothing. Sources: the traces published with
//! "Mooncake: Trading More Storage for Less Computation", FAST 2025; Azure's LLM inference traces
//! of 2023 ("Splitwise", ISCA 2024); "BurstGPT", 2024.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use slipstream_base::SimTime;
use slipstream_base::mix::draw;
use slipstream_base::width;
use slipstream_config::workload_file::{Arrival, OnBadLine, TraceFile, Workload};
use slipstream_os::files;

use crate::draw::Stream;
use crate::error::{SourceError, served_are};
use crate::form::{Form, LINE_BYTES_MAX, Line, ModelName, Names, SessionId, parse_json};
use crate::generate::Arrivals;
use crate::own::SessionLine;
use crate::plausible;
use crate::prompt::{Content, PromptSource, Role, Segment};
use crate::request::{Images, Request, TURNS_MAX};
use crate::turn::{Turn, TurnPrompt, check_ms, check_time_of};

/// Longest bad line that is skipped: a device may have no end.
const SKIPPED_BYTES_MAX: u64 = 1 << 30;

/// Version of the records that are read.
const RECORD_FORMAT: u64 = 1;

/// A trace, read as a stream.
#[derive(Debug)]
pub struct Trace<R = BufReader<Files>> {
    reader: R,
    file: TraceFile,
    /// Known after the first line.
    form: Option<Form>,
    names: Names,
    /// Tokens of each of `hash_ids`.
    per_id: u32,
    /// Time of the first request if the trace begins there, ms.
    first_ms: Option<f64>,
    arrivals: Arrivals,
    texts: Stream,
    line: u64,
    buffer: Vec<u8>,
    /// The line in the buffer is longer than [`LINE_BYTES_MAX`], and incomplete.
    too_long: bool,
    last_ms: f64,
    /// The same as the file has it.
    last_written: String,
    session: u64,
    left: u64,
    skipped: u64,
    failed: bool,
    /// The first line of a record was read.
    recorded: bool,
    /// First turns that were read ahead, if lines name sessions.
    ready: VecDeque<(Option<f64>, Turn)>,
    /// Later turns of sessions that have begun (or were read ahead), by session.
    later: RefCell<HashMap<u64, VecDeque<Turn>>>,
    time_scale: f64,
    /// Whether requests are due at the trace's times.
    follows_times: bool,
    /// The models that requests may be for; empty: they are not read.
    served: Vec<String>,
}

/// The first line of each file of a record.
#[derive(Deserialize)]
struct RecordHead {
    slipstream_record: u64,
    tokens_per_id: u32,
}

/// A file, or the JSON lines files of a folder one after the other, by name.
#[derive(Debug)]
pub struct Files {
    left: VecDeque<PathBuf>,
    current: File,
    last: u8,
}

impl Files {
    /// Opens `path`, a file or a folder.
    ///
    /// # Errors
    /// If it, or the first file in it, cannot be opened.
    pub fn open(path: &Path) -> io::Result<Files> {
        let mut left = VecDeque::from([path.to_owned()]);
        if path.is_dir() {
            let mut files = Vec::new();
            for entry in std::fs::read_dir(path)? {
                let file = entry?.path();
                if file
                    .extension()
                    .is_some_and(|extension| extension == "jsonl")
                {
                    files.push(file);
                }
            }
            files.sort();
            left = files.into();
        }
        let Some(first) = left.pop_front() else {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                "the folder has no file with the ending .jsonl",
            ));
        };
        Ok(Files {
            left,
            current: files::open_stream(&first)?,
            last: b'\n',
        })
    }
}

impl Read for Files {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            let read = self.current.read(buffer)?;
            if read > 0 {
                self.last = buffer[read - 1];
                return Ok(read);
            }
            // A file that was cut off must not run into the next one.
            if self.last != b'\n' && !self.left.is_empty() {
                self.last = b'\n';
                buffer[0] = b'\n';
                return Ok(1);
            }
            let Some(next) = self.left.pop_front() else {
                return Ok(0);
            };
            self.current = files::open_stream(&next)?;
        }
    }
}

/// Content of a line.
enum Parsed {
    Header,
    Line(Line),
    Session(SessionLine),
}

/// The key that a record's files begin with.
const RECORD_KEY: &[u8] = b"\"slipstream_record\"";

/// Latest first request of a trace in JSON lines that begins at 0, ms. A later one is a time since another moment, such
/// as 1970.
const FIRST_MS_MAX: f64 = 3_600e3;

/// The usual number of tokens per id that fits a request, as a hint.
fn said_tokens_per_id(input: u32, ids: usize) -> String {
    let fits = |per_id: &u32| u64::from(input).div_ceil(u64::from(*per_id)) == ids as u64;
    let found = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
        .into_iter()
        .find(fits);
    found.map_or_else(String::new, |per_id| {
        format!(
            "; if an id stands for {per_id} tokens, set `tokens_per_id = {per_id}` of [trace] in a workload file \
             (`--tokens-per-id {per_id}` of `slipstream trace`)"
        )
    })
}

impl Trace {
    pub(crate) fn open(
        workload: &Workload,
        file: &TraceFile,
        salt: u64,
    ) -> Result<Self, SourceError> {
        let reader = Files::open(&file.path).map_err(|source| SourceError::Io {
            path: file.path.clone(),
            source,
        })?;
        if let Some(what) = plausible::examine(workload).refusal {
            return Err(SourceError::Unit { what });
        }
        Ok(Trace::new(BufReader::new(reader), workload, file, salt))
    }
}

impl<R: BufRead> Trace<R> {
    /// Reads a trace from `reader`; `file` is its name in errors.
    pub fn new(reader: R, workload: &Workload, file: &TraceFile, salt: u64) -> Trace<R> {
        Trace {
            reader,
            file: file.clone(),
            form: None,
            names: Names::default(),
            per_id: file.tokens_per_id.unwrap_or(512),
            first_ms: None,
            arrivals: Arrivals::new(workload, salt),
            texts: Stream::named(workload.seed ^ salt, "trace"),
            line: 0,
            buffer: Vec::new(),
            too_long: false,
            last_ms: 0.0,
            last_written: "0".into(),
            session: 0,
            left: workload.requests.unwrap_or(u64::MAX),
            skipped: 0,
            failed: false,
            recorded: false,
            ready: VecDeque::new(),
            later: RefCell::default(),
            time_scale: workload.time_scale,
            follows_times: workload.arrival == Arrival::Trace,
            served: workload.served_models.clone(),
        }
    }

    /// The place of the model of a line among those that are served.
    fn place(&self, model: Option<&ModelName>) -> Result<u32, String> {
        if self.served.is_empty() {
            return Ok(0);
        }
        match model {
            Some(ModelName::Text(name)) => {
                let at = self.served.iter().position(|served| served == name);
                at.map(width::to_u32).ok_or_else(|| {
                    format!(
                        "`model` is \"{name}\", which no pool serves; there {}",
                        served_are(&self.served)
                    )
                })
            }
            Some(ModelName::Other(_)) => Err("`model` is not a name".into()),
            None if self.served.len() == 1 => Ok(0),
            None => Err(format!(
                "`model` is missing, and there {}",
                served_are(&self.served)
            )),
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
        self.too_long = false;
        let read = (&mut self.reader)
            .take(LINE_BYTES_MAX)
            .read_until(b'\n', &mut self.buffer)?;
        if self.line == 1 && self.buffer.starts_with(b"\xef\xbb\xbf") {
            // The byte order mark that some programs write before UTF-8.
            self.buffer.drain(..3);
        }
        if read as u64 == LINE_BYTES_MAX && self.buffer.last() != Some(&b'\n') {
            self.too_long = true;
            if self.file.on_bad_line == OnBadLine::Stop {
                return Ok(true); // the end of the line may never come
            }
            // Skip to the end of the line without storing it.
            self.buffer.clear();
            let mut skipped = 0;
            while !self.reader.fill_buf()?.is_empty() {
                if skipped > SKIPPED_BYTES_MAX {
                    let error = format!("line {} has no end within 1 GiB", self.line);
                    return Err(std::io::Error::other(error));
                }
                let chunk = self.reader.fill_buf()?;
                let end = chunk.iter().position(|b| *b == b'\n');
                let used = end.map_or(chunk.len(), |at| at + 1);
                self.reader.consume(used);
                skipped += used as u64;
                if end.is_some() {
                    break;
                }
            }
        }
        Ok(read > 0)
    }

    /// The buffer's line, or its error.
    fn parse(&mut self) -> Result<Parsed, String> {
        if self.too_long {
            return Err(format!("longer than {LINE_BYTES_MAX} bytes"));
        }
        let first = self.form.is_none();
        if first {
            let (form, names) = Form::of(&self.buffer, &self.file)?;
            self.per_id = self.file.tokens_per_id.unwrap_or(form.tokens_per_id());
            self.names = names;
            self.form = Some(form);
        }
        let form = self.form.as_mut().expect("it is known by now");
        let mut line = match form {
            Form::Csv(_) if first => return Ok(Parsed::Header),
            Form::Sessions => return Ok(Parsed::Session(parse_json(&self.buffer)?)),
            Form::Record if memchr::memmem::find(&self.buffer, RECORD_KEY).is_some() => {
                let head = parse_json(&self.buffer)?;
                self.on_record_head(&head)?;
                return Ok(Parsed::Header);
            }
            form => form.parse(&self.buffer, &self.file)?,
        };
        if let Some(ms) = &mut line.timestamp {
            // Tables begin at their first request, whatever its time; other formats unless that is soon after 0.
            let soon = match self.form {
                Some(Form::Csv(_) | Form::Named(_)) => 0.0..=0.0,
                // A record is sorted first.
                Some(Form::Record) => f64::MIN..=f64::MAX,
                _ => 0.0..=FIRST_MS_MAX,
            };
            let first = *self.first_ms.get_or_insert(*ms);
            if !soon.contains(&first) {
                *ms -= first;
            }
        }
        if !self.served.is_empty() {
            line.served = self.place(line.model.as_ref())?;
        }
        if line.input_length == 0 {
            return Err(format!(
                "`{}` is 0; a prompt has at least one token",
                self.names.input
            ));
        }
        if let Some(ids) = &line.hash_ids {
            let per_id = u64::from(self.per_id);
            let needed = u64::from(line.input_length).div_ceil(per_id);
            if ids.len() as u64 != needed {
                return Err(format!(
                    "`input_length` {} takes {needed} ids of {per_id} tokens, but `hash_ids` has {}{}",
                    line.input_length,
                    ids.len(),
                    said_tokens_per_id(line.input_length, ids.len())
                ));
            }
        }
        if line.output_length == 0 {
            return Err(format!(
                "`{}` is 0; an answer has at least one token",
                self.names.output
            ));
        }
        if let Some(timestamp) = line.timestamp {
            check_time_of(&self.names.time, timestamp, line.written.as_deref())?;
        }
        if let Some(delay) = line.delay {
            if delay < 0.0 {
                return Err("`delay` is negative".into());
            }
            check_ms("delay", delay)?;
        }
        Ok(Parsed::Line(line))
    }

    /// Takes the block size of a record. All of its files have the same.
    fn on_record_head(&mut self, head: &RecordHead) -> Result<(), String> {
        if head.slipstream_record != RECORD_FORMAT {
            return Err(format!(
                "a record of version {}, but {RECORD_FORMAT} is the only one known",
                head.slipstream_record
            ));
        }
        if head.tokens_per_id == 0 {
            return Err("`tokens_per_id` is 0".into());
        }
        if self.recorded && head.tokens_per_id != self.per_id {
            return Err(format!(
                "`tokens_per_id` is {}, but {} in the files before; replay them apart",
                head.tokens_per_id, self.per_id
            ));
        }
        self.recorded = true;
        self.per_id = head.tokens_per_id;
        Ok(())
    }

    /// Checks that a session does not begin before the previous one.
    fn check_time(
        &mut self,
        timestamp: Option<f64>,
        written: Option<String>,
    ) -> Result<(), String> {
        let Some(timestamp) = timestamp else {
            return if self.follows_times {
                let what = match self.names.time.as_str() {
                    "" => "--trace-columns names no `arrival`; name it".to_owned(),
                    name => format!(
                        "`{name}` is missing; add it, name another field with --trace-columns \
                         arrival=NAME,isl={},osl={} and --trace-unit",
                        self.names.input, self.names.output
                    ),
                };
                Err(format!(
                    "{what}, or set the arrivals (`arrival.kind`, `--rate`, `--concurrency`)"
                ))
            } else {
                Ok(())
            };
        };
        check_time_of(&self.names.time, timestamp, written.as_deref())?;
        let written = written.unwrap_or_else(|| timestamp.to_string());
        if timestamp < self.last_ms {
            return Err(format!(
                "`{}` {written} is before the line above it ({}), and a trace is sorted by time",
                self.names.time, self.last_written
            ));
        }
        self.last_ms = timestamp;
        self.last_written = written;
        Ok(())
    }

    /// The prompt of a line. `text` identifies its text if it has no ids.
    fn turn(&self, line: &Line, text: u64) -> Turn {
        let per_id = self.per_id;
        let segment = |name: u64, tokens: u32| Segment {
            content: Content::Text(name),
            tokens,
            role: Role::User,
        };
        let segments = match &line.hash_ids {
            Some(ids) => ids
                .iter()
                .zip(0u32..)
                .map(|(id, i)| {
                    let tokens = per_id.min(line.input_length - per_id * i);
                    segment(draw(self.texts.bits(0), *id), tokens)
                })
                .collect(),
            None => vec![segment(draw(self.texts.bits(1), text), line.input_length)],
        };
        Turn {
            prompt: TurnPrompt::Whole(segments),
            output_len: line.output_length,
            delay_ms: line.delay,
            not_before_ms: if line.delay.is_some() {
                None
            } else {
                line.timestamp
            },
            priority: line.priority,
            ignore_eos: true,
            model: line.served,
        }
    }

    /// Begins the next session with these turns.
    fn begin(
        &mut self,
        timestamp: Option<f64>,
        first: Turn,
        later: VecDeque<Turn>,
    ) -> Option<Request> {
        let due = self
            .arrivals
            .next(Some(timestamp.unwrap_or(self.last_ms)))?;
        let session = self.session;
        self.session += 1;
        let turns = width::to_u32((1 + later.len() as u64).min(self.left));
        self.left -= u64::from(turns);
        if turns > 1 {
            self.later.borrow_mut().insert(session, later);
        }
        let (TurnPrompt::Whole(segments) | TurnPrompt::Add(segments)) = first.prompt;
        Some(Request {
            session,
            turn: 0,
            turns,
            due,
            prompt: PromptSource::new(segments),
            output_len: first.output_len,
            ignore_eos: first.ignore_eos,
            priority: first.priority,
            adapter: 0,
            images: Images::default(),
            model: first.model,
            class: 0,
        })
    }

    /// The turn after `request`; see [`Source::follow_up`](crate::Source::follow_up).
    pub(crate) fn follow_up(
        &self,
        request: &Request,
        answer_tokens: u32,
        now: SimTime,
    ) -> Option<Request> {
        if !request.has_next() {
            self.forget(request.session);
            return None;
        }
        let turn = {
            let mut later = self.later.borrow_mut();
            later.get_mut(&request.session)?.pop_front()?
        };
        let scaled = |ms: f64| SimTime::from_secs_f64(ms / 1e3 / self.time_scale);
        let due = now + turn.delay_ms.map_or(0, |ms| scaled(ms).0);
        let due = turn.not_before_ms.map_or(due, |ms| due.max(scaled(ms)));
        let prompt = match turn.prompt {
            TurnPrompt::Whole(segments) => PromptSource::new(segments),
            TurnPrompt::Add(segments) => {
                let answer = Segment {
                    content: Content::Answer(request.id()),
                    tokens: answer_tokens,
                    role: Role::Assistant,
                };
                let before = request.prompt.segments().iter().copied();
                PromptSource::new(before.chain([answer]).chain(segments))
            }
        };
        Some(Request {
            turn: request.turn + 1,
            due,
            prompt,
            output_len: turn.output_len,
            ignore_eos: turn.ignore_eos,
            priority: turn.priority,
            ..*request
        })
    }

    /// Ends the session.
    pub(crate) fn forget(&self, session: u64) {
        self.later.borrow_mut().remove(&session);
    }

    /// Whether sessions may have more than one turn, as far as the file was read.
    pub(crate) fn has_sessions(&self) -> bool {
        matches!(self.form, Some(Form::Sessions)) || !self.later.borrow().is_empty()
    }

    /// Reads the next line with content, except header lines and (if they are skipped) bad ones.
    fn next_line(&mut self) -> Result<Option<Parsed>, SourceError> {
        loop {
            let more = self.read_line().map_err(|source| SourceError::Io {
                path: self.file.path.clone(),
                source,
            })?;
            if !more {
                return Ok(None);
            }
            if !self.too_long && self.buffer.trim_ascii().is_empty() {
                continue;
            }
            match self.parse() {
                Ok(Parsed::Header) => {}
                Ok(parsed) => return Ok(Some(parsed)),
                Err(what) => self.on_bad_line(what)?,
            }
        }
    }

    /// Counts a bad line, or fails with it.
    fn on_bad_line(&mut self, what: String) -> Result<(), SourceError> {
        if self.file.on_bad_line == OnBadLine::Skip {
            self.skipped += 1;
            return Ok(());
        }
        Err(SourceError::BadLine {
            path: self.file.path.clone(),
            line: self.line,
            what,
        })
    }

    /// Reads the rest of a file whose lines name sessions, and joins their turns.
    fn read_sessions(&mut self, first: Line) -> Result<(), SourceError> {
        let mut sessions = Sessions::default();
        let mut next = Some(Parsed::Line(first));
        while let Some(parsed) = next {
            if let Parsed::Line(line) = parsed {
                let turn = self.turn(&line, sessions.text(&line));
                let checked = match sessions.open(&line) {
                    Some(at) if sessions.is_full(at) => {
                        Err(format!("a session has at most {TURNS_MAX} turns"))
                    }
                    Some(_) => Ok(()),
                    None => self.check_time(line.timestamp, line.written.clone()),
                };
                match checked {
                    Ok(()) => sessions.add(line, turn),
                    Err(what) => self.on_bad_line(what)?,
                }
            }
            next = self.next_line()?;
        }
        self.make_ready(sessions);
        Ok(())
    }

    /// Reads the rest of a record, whose lines are in order of the requests' ends, and joins the
    /// turns of sessions.
    fn read_record(&mut self, first: Line) -> Result<(), SourceError> {
        let mut lines = Vec::new();
        let mut next = Some(Parsed::Line(first));
        while let Some(parsed) = next {
            if let Parsed::Line(line) = parsed {
                match line.timestamp {
                    Some(timestamp) => lines.push((timestamp, line)),
                    None => self.on_bad_line("`timestamp` is missing".into())?,
                }
            }
            next = self.next_line()?;
        }
        lines.sort_by(|a, b| a.0.total_cmp(&b.0));
        // It begins at its first request, whatever its time.
        let start = lines.first().map_or(0.0, |(timestamp, _)| *timestamp);
        let mut sessions = Sessions::default();
        for (timestamp, mut line) in lines {
            line.timestamp = Some(timestamp - start);
            if sessions.open(&line).is_some_and(|at| sessions.is_full(at)) {
                sessions.close(&line);
            }
            let turn = self.turn(&line, sessions.text(&line));
            sessions.add(line, turn);
        }
        self.make_ready(sessions);
        Ok(())
    }

    fn make_ready(&mut self, sessions: Sessions) {
        let mut later = self.later.borrow_mut();
        for (index, (timestamp, first, turns)) in sessions.all.into_iter().enumerate() {
            self.ready.push_back((timestamp, first));
            if !turns.is_empty() {
                later.insert(index as u64, turns);
            }
        }
    }

    /// The next session, from those read ahead or from the file.
    fn next_session(&mut self) -> Result<Option<Request>, SourceError> {
        loop {
            if let Some((timestamp, first)) = self.ready.pop_front() {
                let later = self.later.borrow_mut().remove(&self.session);
                return Ok(self.begin(timestamp, first, later.unwrap_or_default()));
            }
            let Some(parsed) = self.next_line()? else {
                if self.session == 0 {
                    return Err(SourceError::Empty {
                        path: self.file.path.clone(),
                        skipped: self.skipped,
                    });
                }
                return Ok(None);
            };
            let checked = match parsed {
                Parsed::Header => Ok(None),
                Parsed::Line(line) if self.recorded => {
                    self.read_record(line)?;
                    continue;
                }
                Parsed::Line(line) if line.session_id.is_some() && self.session == 0 => {
                    self.read_sessions(line)?;
                    continue;
                }
                Parsed::Line(line) if line.session_id.is_some() => Err(
                    "`session_id` in a file whose first request has none; add one to every line, or to none"
                        .to_owned(),
                ),
                Parsed::Line(line) => self.check_time(line.timestamp, line.written.clone()).map(|()| {
                    let turn = self.turn(&line, self.session);
                    Some((line.timestamp, turn, VecDeque::new()))
                }),
                Parsed::Session(line) => self.place(line.model.as_ref()).and_then(|model| {
                    let turns = line.turns(model)?;
                    self.check_time(line.timestamp, None)?;
                    let mut turns = VecDeque::from(turns);
                    let first = turns.pop_front().expect("`turns()` gives at least one");
                    Ok(Some((line.timestamp, first, turns)))
                }),
            };
            match checked {
                Ok(Some((timestamp, first, later))) => {
                    return Ok(self.begin(timestamp, first, later));
                }
                Ok(None) => {}
                Err(what) => self.on_bad_line(what)?,
            }
        }
    }
}

/// Lines, joined to sessions.
#[derive(Default)]
struct Sessions {
    /// First lines in order, each with the turns after it.
    all: Vec<(Option<f64>, Turn, VecDeque<Turn>)>,
    known: HashMap<SessionId, usize>,
}

impl Sessions {
    /// The session that `line` continues.
    fn open(&self, line: &Line) -> Option<usize> {
        self.known.get(line.session_id.as_ref()?).copied()
    }

    /// Name of the text of `line`, if it has no ids.
    fn text(&self, line: &Line) -> u64 {
        self.open(line).unwrap_or(self.all.len()) as u64
    }

    fn is_full(&self, at: usize) -> bool {
        self.all[at].2.len() + 1 >= TURNS_MAX as usize
    }

    /// A later line of the session of `line` begins a new one.
    fn close(&mut self, line: &Line) {
        if let Some(id) = &line.session_id {
            self.known.remove(id);
        }
    }

    fn add(&mut self, line: Line, turn: Turn) {
        if let Some(at) = self.open(&line) {
            self.all[at].2.push_back(turn);
            return;
        }
        if let Some(id) = line.session_id {
            self.known.insert(id, self.all.len());
        }
        self.all.push((line.timestamp, turn, VecDeque::new()));
    }
}

impl<R: BufRead> Iterator for Trace<R> {
    type Item = Result<Request, SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 || self.failed {
            return None;
        }
        match self.next_session() {
            Ok(request) => request.map(Ok),
            Err(error) => {
                self.failed = true;
                Some(Err(error))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::form::date_ms;
    use slipstream_config::workload_file::{self, Arrival};

    fn check(text: &str, on_bad_line: OnBadLine) -> (Vec<Result<Request, String>>, u64) {
        let file = TraceFile {
            path: "t.jsonl".into(),
            on_bad_line,
            tokens_per_id: None,
            ..TraceFile::default()
        };
        let workload = Workload {
            seed: 0,
            requests: None,
            duration_s: None,
            time_scale: 10.0,
            window_s: None,
            served_models: Vec::new(),
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

    #[test]
    fn a_line_without_end_is_an_error() {
        for (on_bad_line, says) in [
            (OnBadLine::Stop, "line 1: longer than 4194304 bytes"),
            (OnBadLine::Skip, "line 1 has no end within 1 GiB"),
        ] {
            let file = TraceFile {
                path: "t.jsonl".into(),
                on_bad_line,
                tokens_per_id: None,
                ..TraceFile::default()
            };
            let workload = Workload {
                seed: 0,
                requests: None,
                duration_s: None,
                time_scale: 1.0,
                window_s: None,
                served_models: Vec::new(),
                arrival: Arrival::Trace,
                content: workload_file::Content::Trace(file.clone()),
            };
            let endless = BufReader::with_capacity(1 << 20, std::io::repeat(0));
            let mut trace = Trace::new(endless, &workload, &file, 0);
            let error = trace.next().expect("a line").unwrap_err();
            let text = format!("{error} {:?}", std::error::Error::source(&error));
            assert!(text.contains(says), "{text}");
        }
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

    /// Two requests of a session, of which the first ended last, and one of none.
    #[test]
    fn a_record_is_sorted_and_has_its_own_block_size() {
        let text = r#"{"slipstream_record": 1, "tokens_per_id": 16}
            {"timestamp": 5030.5, "input_length": 20, "output_length": 3, "hash_ids": [7, 1], "session_id": 9}
            {"timestamp": 5000.0, "input_length": 40, "output_length": 5, "hash_ids": [7, 8, 2], "class": "x"}

            {"slipstream_record": 1, "tokens_per_id": 16}
            {"timestamp": 5010.0, "input_length": 16, "output_length": 4, "hash_ids": [7], "session_id": 9}"#;
        let (requests, skipped) = check(text, OnBadLine::Stop);
        let requests: Vec<Request> = requests.into_iter().map(Result::unwrap).collect();
        assert_eq!((requests.len(), skipped), (2, 0));
        let due: Vec<u64> = requests.iter().map(|r| r.due.0).collect();
        assert_eq!(due, [0, 1_000_000]); // time scale 10
        assert_eq!((requests[0].output_len, requests[1].output_len), (5, 4));
        assert_eq!((requests[1].turn, requests[1].turns), (0, 2));
        let tokens: Vec<u32> = requests[0]
            .prompt
            .segments()
            .iter()
            .map(|s| s.tokens)
            .collect();
        assert_eq!(tokens, [16, 16, 8]);
        // Equal ids are equal texts here too.
        assert_eq!(
            requests[0].prompt.segments()[0],
            requests[1].prompt.segments()[0]
        );
    }

    #[test]
    fn records_that_do_not_fit_are_refused() {
        let line = r#"{"timestamp": 1, "input_length": 5, "output_length": 3, "hash_ids": [7]}"#;
        let head = |version: u32, tokens: u32| {
            format!("{{\"slipstream_record\": {version}, \"tokens_per_id\": {tokens}}}\n{line}\n")
        };
        for (text, says) in [
            (head(2, 16), "version 2"),
            (head(1, 0), "`tokens_per_id` is 0"),
            (head(1, 16) + &head(1, 32), "but 16 in the files before"),
            (head(1, 16) + "{\"timestamp\": 1, \"inp\n", "line 3"),
        ] {
            let (requests, _) = check(&text, OnBadLine::Stop);
            let error = requests.last().unwrap().as_ref().unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn the_files_of_a_folder_are_read_one_after_the_other() {
        let folder = tempfile::tempdir().unwrap();
        let write =
            |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        assert!(Files::open(folder.path()).is_err());
        write("b.jsonl", "2\n3");
        write("a.jsonl", "1");
        write("c.jsonl", "");
        write("d.jsonl", "4\n");
        write("e.txt", "no");
        let mut text = String::new();
        Files::open(folder.path())
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(text, "1\n2\n3\n4\n");
    }

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
            (&GOOD.replace("600", "-1"), "`input_length` is -1"),
            (&GOOD.replace("600", "0"), "`input_length` is 0"),
            (&GOOD.replace("[7, 8]", "[7]"), "takes 2 ids"),
            (&GOOD.replace("5,", "0,"), "`output_length` is 0"),
            (&GOOD.replace("1000", "10"), "sorted by time"),
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
    fn a_trace_without_a_request_is_an_error() {
        for (text, on_bad_line, says) in [
            ("", OnBadLine::Stop, "trace t.jsonl: it has no request"),
            ("\n \n", OnBadLine::Stop, "it has no request"),
            (
                "TIMESTAMP,ContextTokens,GeneratedTokens\n",
                OnBadLine::Stop,
                "it has no request",
            ),
            ("{\n{\n", OnBadLine::Skip, "all 2 of its lines were skipped"),
        ] {
            let (requests, _) = check(text, on_bad_line);
            assert_eq!(requests.len(), 1, "{text:?}");
            let error = requests[0].as_ref().unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_mark_before_the_first_line_does_not_count() {
        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.680590,374,44\n";
        for text in [GOOD, azure] {
            let (requests, _) = check(&format!("\u{feff}{text}"), OnBadLine::Stop);
            let (plain, _) = check(text, OnBadLine::Stop);
            assert_eq!(requests, plain);
            assert!(requests[0].is_ok(), "{requests:?}");
        }
    }

    const SESSIONS: &str = r#"
{"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
{"session_id": "b", "timestamp": 100, "input_length": 40, "output_length": 6}
{"session_id": "a", "delay": 2000, "input_length": 900, "output_length": 7, "hash_ids": [1, 3], "priority": 4}
{"session_id": 7, "timestamp": 300, "input_length": 50, "output_length": 8}
{"session_id": "b", "timestamp": 5000, "input_length": 90, "output_length": 9}
"#;

    /// Every request, with answers after `service_ms`: name, due (ms of the trace), prompt and
    /// answer.
    fn drive(text: &str, service_ms: f64) -> Vec<(String, f64, PromptSource, u32)> {
        let file = TraceFile {
            path: "t.jsonl".into(),
            on_bad_line: OnBadLine::Stop,
            tokens_per_id: None,
            ..TraceFile::default()
        };
        let workload = Workload {
            requests: None,
            time_scale: 10.0,
            arrival: Arrival::Trace,
            content: workload_file::Content::Trace(file.clone()),
            ..Workload::default()
        };
        let mut trace = Trace::new(text.as_bytes(), &workload, &file, 0);
        let mut requests = Vec::new();
        while let Some(first) = trace.next() {
            let mut next = Some(first.unwrap());
            while let Some(r) = next {
                let due_ms = r.due.as_secs_f64() * 1e4;
                requests.push((r.name(), due_ms, r.prompt.clone(), r.output_len));
                let done = r.due + SimTime::from_secs_f64(service_ms / 1e4).0;
                next = trace.follow_up(&r, r.output_len, done);
            }
        }
        assert!(
            trace.later.borrow().is_empty(),
            "ended sessions are removed"
        );
        requests
    }

    #[test]
    fn lines_that_name_sessions_are_turns() {
        let requests = drive(SESSIONS, 1_000.0);
        let seen: Vec<_> = requests
            .iter()
            .map(|(name, due, prompt, output)| (&**name, due.round(), prompt.tokens(), *output))
            .collect();
        assert_eq!(
            seen,
            [
                ("0.0", 0.0, 600, 5),
                ("0.1", 3_000.0, 900, 7), // 2 s after the answer
                ("1.0", 100.0, 40, 6),
                ("1.1", 5_000.0, 90, 9), // not before its time
                ("2.0", 300.0, 50, 8),
            ]
        );
        // An answer that takes longer than the next turn's time delays it.
        assert_eq!(drive(SESSIONS, 9_000.0)[3].1.round(), 9_100.0);
        // Without ids, a session's prompts begin alike.
        assert_eq!(
            requests[2].2.segments()[0].content,
            requests[3].2.segments()[0].content
        );
        assert_eq!(requests[0].2.segments()[0], requests[1].2.segments()[0]);
    }

    #[test]
    fn sessions_that_cannot_be_are_named() {
        let two = |a: &str, b: &str| {
            format!(
                "{{\"input_length\": 4, \"output_length\": 5, {a}}}\n{{\"input_length\": 4, \"output_length\": 5, {b}}}"
            )
        };
        for (text, says) in [
            (
                two("\"timestamp\": 1", "\"timestamp\": 2, \"session_id\": 3"),
                "first request has none",
            ),
            (
                two("\"timestamp\": 1", "\"delay\": 5"),
                "`timestamp` is missing",
            ),
            (
                two(
                    "\"timestamp\": 1, \"session_id\": 3",
                    "\"session_id\": 3, \"delay\": -5",
                ),
                "`delay` is negative",
            ),
            (
                two(
                    "\"timestamp\": 9, \"session_id\": 3",
                    "\"session_id\": 4, \"timestamp\": 5",
                ),
                "sorted by time",
            ),
        ] {
            let (requests, _) = check(&text, OnBadLine::Stop);
            let error = requests.iter().find_map(|r| r.as_ref().err()).expect(says);
            assert!(error.contains(says) && error.contains("line 2"), "{error}");
            let (requests, skipped) = check(&text, OnBadLine::Skip);
            assert_eq!((requests.len(), skipped), (1, 1), "{requests:?}");
        }
    }

    /// A first line whose time is not a number must not affect the lines after it, which count from
    /// it.
    #[test]
    fn seconds_that_are_no_number_are_named_and_skipped() {
        let head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n";
        for bad in ["nan", "inf", "-inf", "1e400", "soon"] {
            let text = format!("{head}{bad},m,9,2,11,x\n5,m,9,2,11,x\n7,m,9,2,11,x\n");
            let (requests, _) = check(&text, OnBadLine::Stop);
            let error = requests[0].as_ref().unwrap_err();
            assert!(
                error.contains("line 2: ") && error.contains("not a number of seconds"),
                "{error}"
            );
            let (requests, skipped) = check(&text, OnBadLine::Skip);
            assert_eq!((requests.len(), skipped), (2, 1), "{requests:?}");
        }
        let text = format!("{head}0,m,9,2,11,x\n1e300,m,9,2,11,x\n");
        let (requests, _) = check(&text, OnBadLine::Stop);
        let error = requests[1].as_ref().unwrap_err();
        assert!(
            error.contains("`Timestamp` is 1e300, but must be at most a century"),
            "{error}"
        );
    }

    #[test]
    fn sessions_of_our_own_form_that_cannot_be_are_named() {
        let good = r#"{"timestamp": 0, "turns": [{"add": [[1, 5]], "output_length": 2}]}"#;
        for (bad, says) in [
            (r#"{"timestamp": 0, "turns": []}"#, "0 turns"),
            (
                r#"{"timestamp": 0, "turns": [{"output_length": 2}]}"#,
                "turn 0: set one of",
            ),
            (
                r#"{"timestamp": 0, "turns": [{"add": [[1, 5]], "prompt": [[1, 5]], "output_length": 2}]}"#,
                "turn 0: set one of",
            ),
            (
                r#"{"timestamp": 0, "turns": [{"add": [], "output_length": 2}]}"#,
                "has 1 to",
            ),
            (
                r#"{"timestamp": 0, "turns": [{"add": [[1, 4294967295], [2, 9]], "output_length": 2}]}"#,
                "has 1 to",
            ),
            (
                r#"{"timestamp": 0, "turns": [{"add": [[1, 5]], "output_length": 0}]}"#,
                "`output_length` is 0",
            ),
            (
                r#"{"timestamp": 0, "turns": [{"add": [[1, 5]], "output_length": 2, "delay": -1}]}"#,
                "`delay` is negative",
            ),
            (
                r#"{"timestamp": 0, "turns": [{"add": [[1, 5]], "output_length": 2, "delay": 1e300}]}"#,
                "`delay` is 1e300 ms, but must be at most a century",
            ),
            (
                r#"{"timestamp": 4e12, "turns": [{"add": [[1, 5]], "output_length": 2}]}"#,
                "`timestamp` is 4e12 ms, but must be at most a century (3.15576e12 ms)",
            ),
            (
                r#"{"timestamp": 0, "turns": [{"ad": [[1, 5]], "output_length": 2}]}"#,
                "unknown field `ad`",
            ),
            (
                r#"{"timestamp": 0, "turns": [{"add": [[1]], "output_length": 2}]}"#,
                "column",
            ),
            (
                r#"{"turns": [{"add": [[1, 5]], "output_length": 2}]}"#,
                "`timestamp` is missing",
            ),
        ] {
            let text = format!("{good}\n{bad}\n{good}\n");
            let (requests, _) = check(&text, OnBadLine::Stop);
            let error = requests[1].as_ref().expect_err(says);
            assert!(error.contains("line 2") && error.contains(says), "{error}");
            let (requests, skipped) = check(&text, OnBadLine::Skip);
            assert_eq!((requests.len(), skipped), (2, 1));
        }
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(32))]

        /// A workload written in our own format and read back gives the same requests, turn by
        /// turn.
        #[test]
        fn a_workload_written_and_read_back_is_the_same(
            seed in 0u64..1_000,
            turns in 1u32..5,
            branches in 1u32..4,
            priority in -3i32..3,
        ) {
            use slipstream_config::workload_file::{Class, Dist, PrefixLevel, SessionShape};
            let class = Class {
                isl: Dist::Uniform { min: 70.0, max: 200.0 },
                osl: Dist::Uniform { min: 1.0, max: 30.0 },
                priority,
                prefix: vec![PrefixLevel { branches, tokens: Dist::Exact(64.0), skew: 0.0 }],
                session: SessionShape {
                    turns: Dist::Exact(f64::from(turns)),
                    think_time_s: Dist::Exact(1.5),
                    ..SessionShape::default()
                },
                ..Class::default()
            };
            let workload = Workload {
                seed,
                requests: Some(20),
                time_scale: 2.0,
                arrival: Arrival::Constant { rate_per_s: 4.0 },
                content: workload_file::Content::Generated(vec![class]),
                ..Workload::default()
            };
            let open = || crate::Source::open(&workload, 0).unwrap();
            let follow = |source: &crate::Source, trace: Option<&Trace<&[u8]>>, first: Request| {
                let mut all = vec![first];
                loop {
                    let last = all.last().unwrap();
                    let (tokens, done) = (last.output_len, last.due + 7_000);
                    let next = match trace {
                        Some(trace) => trace.follow_up(last, tokens, done),
                        None => source.follow_up(last, tokens, done),
                    };
                    match next {
                        Some(next) => all.push(next),
                        None => return all,
                    }
                }
            };
            let mut text = Vec::new();
            let mut source = open();
            while let Some(first) = source.next() {
                crate::write::write_session(&mut text, &source, first.unwrap(), 2.0).unwrap();
            }
            let file = TraceFile {
                path: "own.jsonl".into(),
                on_bad_line: OnBadLine::Stop,
                tokens_per_id: None,
            ..TraceFile::default()
            };
            let replay = Workload { requests: None, arrival: Arrival::Trace, ..workload.clone() };
            let mut trace = Trace::new(&text[..], &replay, &file, 0);
            let mut source = open();
            let mut requests = 0;
            while let Some(first) = source.next() {
                let meant = follow(&source, None, first.unwrap());
                let first = trace.next().unwrap().unwrap();
                let read = follow(&source, Some(&trace), first);
                requests += read.len();
                proptest::prop_assert_eq!(meant, read);
            }
            proptest::prop_assert!(trace.next().is_none());
            proptest::prop_assert_eq!(requests, 20);
        }
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
            ("2023-11-16 24:00:00,1,1", "not a time such as"),
            ("2023-13-16 23:00:00,1,1", "not a time such as"),
            ("yesterday,1,1", "not a time such as"),
            (
                "2023-11-16 23:00:00,x,1",
                "not a number of tokens (column `ContextTokens`)",
            ),
            ("2023-11-16 23:00:00,1", "2 fields, but the header has 3"),
            ("2023-11-16 23:00:00,1,0", "`GeneratedTokens` is 0"),
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
