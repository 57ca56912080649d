//! Recognizes formats of traces by the names of their fields, and parses their lines into requests.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::{Map, Value};
use slipstream_base::width;
use slipstream_config::workload_file::{TimeUnit, TraceColumns, TraceFile};

/// Longest line read, bytes: a prompt of 100 million tokens. A longer one is bad.
pub(crate) const LINE_BYTES_MAX: u64 = 4 << 20;

/// Name and value of the field that states the unit of the times, in the first line.
pub(crate) const UNIT_KEY: &str = "unit";
pub(crate) const UNIT: &str = "ms";

/// A format of a trace.
#[derive(Clone, Debug)]
pub(crate) enum Form {
    /// Mooncake's.
    Json,
    /// Slipstream's own: one session per line.
    Sessions,
    /// A record of a live server.
    Record,
    /// Qwen-Bailian's.
    Bailian(Bailian),
    /// JSON objects whose members the user names.
    Named(TraceColumns),
    Csv(Csv),
}

/// The names of a format's fields, for messages.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    pub(crate) time: String,
    pub(crate) input: String,
    pub(crate) output: String,
}

impl Default for Names {
    fn default() -> Self {
        Names {
            time: "timestamp".into(),
            input: "input_length".into(),
            output: "output_length".into(),
        }
    }
}

/// A request of a trace.
#[derive(Deserialize)]
pub(crate) struct Line {
    /// ms; in another unit until [`Form`]'s is applied.
    #[serde(default)]
    pub(crate) timestamp: Option<f64>,
    pub(crate) input_length: u32,
    pub(crate) output_length: u32,
    /// `None`: the prompt shares nothing with any other.
    #[serde(default)]
    pub(crate) hash_ids: Option<Vec<u64>>,
    #[serde(default)]
    pub(crate) priority: i32,
    #[serde(default)]
    pub(crate) session_id: Option<SessionId>,
    /// Delay after the previous answer, ms.
    #[serde(default)]
    pub(crate) delay: Option<f64>,
    #[serde(default)]
    pub(crate) model: Option<ModelName>,
    /// Index of its model among the served models.
    #[serde(skip)]
    pub(crate) served: u32,
    /// The timestamp as the file has it.
    #[serde(skip)]
    pub(crate) written: Option<String>,
}

/// A model's name, or another JSON value in its place.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum ModelName {
    Text(String),
    Other(serde::de::IgnoredAny),
}

/// A session's name, of any JSON type.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Hash)]
#[serde(
    untagged,
    expecting = "the id of a session or chat is neither a whole number nor a text"
)]
pub(crate) enum SessionId {
    Number(i64),
    Text(String),
}

impl Line {
    /// A request without anything but lengths and a time.
    fn new(timestamp: Option<f64>, input_length: u32, output_length: u32) -> Line {
        Line {
            timestamp,
            input_length,
            output_length,
            hash_ids: None,
            priority: 0,
            session_id: None,
            delay: None,
            model: None,
            served: 0,
            written: None,
        }
    }
}

const SAY_COLUMNS: &str =
    "name its fields with --trace-columns arrival=NAME,isl=NAME,osl=NAME (`columns` of [trace])";
const SAY_UNIT: &str = "state it with --trace-unit s, ms, us or ns (`unit` of [trace])";

impl Form {
    /// Returns the format of a file that begins with `line`, and the names of its fields.
    pub(crate) fn of(line: &[u8], file: &TraceFile) -> Result<(Form, Names), String> {
        if line.trim_ascii_start().starts_with(b"{") {
            let object: Map<String, Value> = parse_json(line)?;
            return Form::of_object(&object, file);
        }
        let text = String::from_utf8_lossy(line);
        let (csv, names) = Csv::of_header(text.trim_end(), file)?;
        Ok((Form::Csv(csv), names))
    }

    fn of_object(object: &Map<String, Value>, file: &TraceFile) -> Result<(Form, Names), String> {
        let has = |name: &str| object.contains_key(name);
        if let Some(columns) = &file.columns {
            let names = Names {
                time: columns.arrival.clone().unwrap_or_default(),
                input: columns.isl.clone(),
                output: columns.osl.clone(),
            };
            return match columns.names().find(|name| !has(name)) {
                None => Ok((Form::Named(columns.clone()), names)),
                Some(absent) => Err(format!(
                    "the first object has no `{absent}`, which --trace-columns names; it has {}",
                    listed(object.keys().map(String::as_str))
                )),
            };
        }
        let form = if has("slipstream_record") {
            Form::Record
        } else if has("turns") {
            Form::Sessions
        } else if has("chat_id") || has("parent_chat_id") {
            Form::Bailian(Bailian::default())
        } else {
            if !["input_length", "output_length"].into_iter().all(has) {
                return Err(format!(
                    "an object with {}, which is no known format; {SAY_COLUMNS}",
                    listed(object.keys().map(String::as_str))
                ));
            }
            Form::Json
        };
        Ok((form, Names::default()))
    }

    /// Tokens of each of `hash_ids`, unless the workload file or a flag sets them.
    pub(crate) fn tokens_per_id(&self) -> u32 {
        match self {
            Form::Bailian(_) => 16,
            _ => 512,
        }
    }

    /// Fields of its objects that are read, or say nothing about the load; `None` if the user names them, and for
    /// tables.
    pub(crate) fn known(&self) -> Option<&'static [&'static str]> {
        match self {
            Form::Json => Some(&[
                "timestamp",
                "input_length",
                "output_length",
                "hash_ids",
                "session_id",
                "delay",
                "priority",
                "model",
                "id",
                "request_id",
                "turn",
                "type",
            ]),
            Form::Bailian(_) => Some(&[
                "chat_id",
                "parent_chat_id",
                "timestamp",
                "input_length",
                "output_length",
                "hash_ids",
                "turn",
                "type",
            ]),
            Form::Sessions => Some(&["timestamp", "model", "turns"]),
            Form::Record | Form::Named(_) | Form::Csv(_) => None,
        }
    }

    /// Parses a line into a request.
    pub(crate) fn parse(&mut self, line: &[u8], file: &TraceFile) -> Result<Line, String> {
        let mut line = match self {
            Form::Sessions | Form::Json | Form::Record => {
                let mut line: Line = parse_line(line)?;
                if let (Some(unit), Form::Json) = (file.unit, &self) {
                    line.written = line.timestamp.map(|time| time.to_string());
                    line.timestamp = line.timestamp.map(|time| time * unit.ms());
                    line.delay = line.delay.map(|time| time * unit.ms());
                }
                line
            }
            Form::Bailian(bailian) => bailian.parse(line, file)?,
            Form::Named(columns) => named(columns, &parse_json(line)?, file)?,
            Form::Csv(csv) => {
                let text = std::str::from_utf8(line).map_err(|e| e.to_string())?;
                csv.parse(text.trim_end())?
            }
        };
        if line.written.is_none() {
            line.written = line.timestamp.map(|time| time.to_string());
        }
        Ok(line)
    }
}

/// `a`, `b` and `c`, of which there may be many.
fn listed<'a>(names: impl Iterator<Item = &'a str>) -> String {
    const SHOWN_MAX: usize = 12;
    let mut names: Vec<String> = names
        .take(SHOWN_MAX + 1)
        .map(|name| format!("`{name}`"))
        .collect();
    if names.len() > SHOWN_MAX {
        names[SHOWN_MAX] = "…".into();
    }
    match names.len() {
        0 => "nothing in it".into(),
        _ => names.join(", "),
    }
}

/// State of a file in the format of Alibaba's Qwen-Bailian traces
/// (`alibaba-edu/qwen-bailian-usagetraces-anon`): times in seconds, 16 tokens per id, and chats that name
/// the chat that they continue.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bailian {
    /// Session of each chat that no other chat continues yet.
    open: HashMap<SessionId, i64>,
    sessions: i64,
}

#[derive(Deserialize)]
struct BailianLine {
    #[serde(default)]
    chat_id: Option<SessionId>,
    #[serde(default)]
    parent_chat_id: Option<SessionId>,
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    #[serde(default)]
    hash_ids: Option<Vec<u64>>,
}

impl Bailian {
    fn parse(&mut self, line: &[u8], file: &TraceFile) -> Result<Line, String> {
        let line: BailianLine = parse_line(line)?;
        // A chat that a second one continues has a branch, which is a session of its own.
        let parent = line
            .parent_chat_id
            .filter(|id| *id != SessionId::Number(-1));
        let continued = parent.and_then(|parent| self.open.remove(&parent));
        let session = continued.unwrap_or_else(|| {
            self.sessions += 1;
            self.sessions
        });
        if let Some(chat) = line.chat_id {
            self.open.insert(chat, session);
        }
        let unit = file.unit.unwrap_or(TimeUnit::S);
        Ok(Line {
            hash_ids: line.hash_ids,
            session_id: Some(SessionId::Number(session)),
            written: Some(line.timestamp.to_string()),
            ..Line::new(
                Some(line.timestamp * unit.ms()),
                line.input_length,
                line.output_length,
            )
        })
    }
}

/// The request of an object whose members have the names of `columns`.
fn named(
    columns: &TraceColumns,
    object: &Map<String, Value>,
    file: &TraceFile,
) -> Result<Line, String> {
    let member = |name: &str| {
        let value = object.get(name).filter(|value| !value.is_null());
        value.ok_or_else(|| format!("`{name}` is missing"))
    };
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let count = |name: &str| tokens(&text(member(name)?), name);
    let mut line = Line::new(None, count(&columns.isl)?, count(&columns.osl)?);
    if let Some(name) = &columns.arrival {
        let written = text(member(name)?);
        line.timestamp = Some(time_ms(&written, name, file.unit)?);
        line.written = Some(written);
    }
    if let Some(name) = &columns.session {
        line.session_id = object
            .get(name)
            .filter(|id| !id.is_null())
            .map(|id| SessionId::Text(text(id)));
    }
    if let Some(name) = &columns.model {
        line.model = object.get(name).map(|model| ModelName::Text(text(model)));
    }
    if let Some(name) = &columns.hash_ids {
        let ids = Vec::<u64>::deserialize(member(name)?);
        line.hash_ids = Some(ids.map_err(|error| format!("`{name}`: {error}"))?);
    }
    Ok(line)
}

/// Positions of the columns in a CSV file.
#[derive(Clone, Debug)]
pub(crate) struct Csv {
    columns: Vec<String>,
    time: Option<usize>,
    input: usize,
    output: usize,
    session: Option<usize>,
    model: Option<usize>,
    /// Unit of the times; `None`: they are dates.
    unit: Option<TimeUnit>,
    /// Dates are known by themselves, numbers only by a unit.
    guards_unit: bool,
}

impl Csv {
    /// The format of a header, if it is a known one or names the columns of `file`.
    fn of_header(header: &str, file: &TraceFile) -> Result<(Csv, Names), String> {
        let columns: Vec<String> = header
            .split(',')
            .map(|name| unquoted(name).to_owned())
            .collect();
        let at = |name: &str| columns.iter().position(|of| of.eq_ignore_ascii_case(name));
        let (names, unit, guards_unit) = if let Some(own) = &file.columns {
            let names = Names {
                time: own.arrival.clone().unwrap_or_default(),
                input: own.isl.clone(),
                output: own.osl.clone(),
            };
            if let Some(absent) = own.names().find(|name| at(name).is_none()) {
                return Err(format!(
                    "the header has no column `{absent}`, which --trace-columns names; it has {}",
                    listed(columns.iter().map(String::as_str))
                ));
            }
            if own.hash_ids.is_some() {
                return Err(
                    "`ids` in --trace-columns: a CSV file has no lists; leave it out".into(),
                );
            }
            (names, file.unit, true)
        } else {
            let azure = at("contexttokens")
                .zip(at("generatedtokens"))
                .zip(at("timestamp"));
            let burst = at("request tokens")
                .zip(at("response tokens"))
                .zip(at("timestamp"));
            let Some(((input, output), time)) = azure.or(burst) else {
                return Err(format!(
                    "neither a JSON object nor a header that is known (`TIMESTAMP,ContextTokens,\
                     GeneratedTokens` or `Timestamp,Model,Request tokens,Response tokens,…`); {SAY_COLUMNS}"
                ));
            };
            let names = Names {
                time: columns[time].clone(),
                input: columns[input].clone(),
                output: columns[output].clone(),
            };
            let seconds = azure.is_none().then_some(TimeUnit::S);
            (names, file.unit.or(seconds), false)
        };
        let own = file.columns.as_ref();
        let csv = Csv {
            time: at(&names.time),
            input: at(&names.input).expect("it was found"),
            output: at(&names.output).expect("it was found"),
            session: own.and_then(|own| at(own.session.as_ref()?)),
            model: match own {
                Some(own) => own.model.as_ref().and_then(|name| at(name)),
                None => at("model"),
            },
            unit,
            guards_unit,
            columns,
        };
        Ok((csv, names))
    }

    /// Whether its times are dates, which need no unit.
    pub(crate) fn has_dates(&self) -> bool {
        self.unit.is_none()
    }

    /// Whether it has all columns of BurstGPT's published files.
    pub(crate) fn is_published_burst(&self) -> bool {
        let has = |name: &str| self.columns.iter().any(|of| of.eq_ignore_ascii_case(name));
        has("total tokens") && has("log type")
    }

    /// Columns of a known format that are not read, unless they say nothing about the load.
    pub(crate) fn unread(&self) -> impl Iterator<Item = &str> {
        const KNOWN: [&str; 4] = ["model", "total tokens", "elapsed time", "log type"];
        let read = [Some(self.input), Some(self.output), self.time];
        self.columns
            .iter()
            .enumerate()
            .filter(move |(at, name)| {
                let known = KNOWN.iter().any(|known| name.eq_ignore_ascii_case(known));
                !self.guards_unit && !known && !name.is_empty() && !read.contains(&Some(*at))
            })
            .map(|(_, name)| name.as_str())
    }

    fn parse(&mut self, line: &str) -> Result<Line, String> {
        let fields: Vec<&str> = line.split(',').map(unquoted).collect();
        if fields.len() != self.columns.len() {
            return Err(format!(
                "{} fields, but the header has {}",
                fields.len(),
                self.columns.len()
            ));
        }
        let count = |at: usize| tokens(fields[at], &self.columns[at]);
        let mut request = Line::new(None, count(self.input)?, count(self.output)?);
        if let Some(at) = self.time {
            let (time, name) = (fields[at], &self.columns[at]);
            request.timestamp = Some(match (self.unit, self.guards_unit) {
                (None, false) => match date_ms(time) {
                    Some(ms) => ms,
                    None if time.parse::<f64>().is_ok() => {
                        return Err(format!(
                            "`{name}` is {time}, a number, but dates are usual in this format; if it is a time, state \
                             its unit with --trace-unit s, ms, us or ns (`unit` of [trace])"
                        ));
                    }
                    None => {
                        return Err(format!(
                            "\"{time}\" is not a time such as 2023-11-16 18:15:46.680590"
                        ));
                    }
                },
                (unit, true) => time_ms(time, name, unit)?,
                (Some(unit), false) => number_ms(time, unit)?,
            });
            request.written = Some(time.to_owned());
        }
        let filled = |at: Option<usize>| at.map(|at| fields[at]).filter(|text| !text.is_empty());
        request.session_id = filled(self.session).map(|id| SessionId::Text(id.to_owned()));
        request.model = self.model.map(|at| ModelName::Text(fields[at].to_owned()));
        Ok(request)
    }
}

/// A field without the quotes that some programs write around every field.
fn unquoted(field: &str) -> &str {
    let field = field.trim();
    let inner = field
        .strip_prefix('"')
        .and_then(|rest| rest.strip_suffix('"'));
    inner.unwrap_or(field).trim()
}

/// A number of tokens, which some programs write as a real number.
fn tokens(text: &str, name: &str) -> Result<u32, String> {
    let real = || {
        let number: f64 = text.parse().ok()?;
        let fits = number.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&number);
        fits.then(|| width::to_u32(width::floor_u64(number)))
    };
    let whole = text.parse::<u32>().ok().or_else(real);
    whole.ok_or_else(|| format!("\"{text}\" is not a number of tokens (column `{name}`)"))
}

/// A time of a field that the user has named: a date, or a number in the stated `unit`.
fn time_ms(text: &str, name: &str, unit: Option<TimeUnit>) -> Result<f64, String> {
    if let Some(ms) = date_ms(text) {
        return Ok(ms);
    }
    match unit {
        Some(unit) => number_ms(text, unit),
        None if text.parse::<f64>().is_ok() => Err(format!(
            "`{name}` is {text}, whose unit is not known; {SAY_UNIT}"
        )),
        None => Err(format!(
            "`{name}` is \"{text}\", which is neither a date nor a number"
        )),
    }
}

fn number_ms(text: &str, unit: TimeUnit) -> Result<f64, String> {
    // An infinite or NaN time would affect all lines after it, as traces begin at their first.
    let number = text.parse().ok().filter(|time: &f64| time.is_finite());
    let number = number.ok_or_else(|| format!("\"{text}\" is not a number of {}", unit.word()))?;
    Ok(number * unit.ms())
}

/// `YYYY-MM-DD HH:MM:SS[.fraction]` as ms since 1970; zones are ignored.
pub(crate) fn date_ms(text: &str) -> Option<f64> {
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
        && (1..=days_of(year, month)).contains(&day)
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

/// Days of a month.
fn days_of(year: i64, month: i64) -> i64 {
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    match month {
        2 if leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// A line of a known format, or an error that names the field at fault.
fn parse_line<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    parse_json(bytes).map_err(|error| wrong_field(bytes).unwrap_or(error))
}

/// What is wrong with the type of a field of a known format.
fn wrong_field(line: &[u8]) -> Option<String> {
    let object: Map<String, Value> = serde_json::from_slice(line).ok()?;
    let fields = [
        ("timestamp", "a number"),
        ("delay", "a number"),
        ("input_length", "a whole number up to 4,294,967,295"),
        ("output_length", "a whole number up to 4,294,967,295"),
    ];
    let is_length = |value: &Value| value.as_u64().is_some_and(|n| u32::try_from(n).is_ok());
    for (name, must) in fields {
        let is_time = ["timestamp", "delay"].contains(&name);
        let Some(value) = object.get(name) else {
            continue;
        };
        if value.is_null() && is_time
            || if is_time {
                value.is_number()
            } else {
                is_length(value)
            }
        {
            continue;
        }
        // The other reader knows dates, and numbers that are written as texts or as real numbers.
        let text = value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned);
        let reads = if is_time {
            date_ms(&text).is_some() || text.parse::<f64>().is_ok()
        } else {
            tokens(&text, name).is_ok()
        };
        let hint = if reads && name != "delay" {
            let ids = if object.contains_key("hash_ids") {
                ",ids=hash_ids"
            } else {
                ""
            };
            let unit = if date_ms(&text).is_some() {
                ""
            } else {
                " --trace-unit ms"
            };
            format!(
                "; to read such values, name the fields: --trace-columns \
                 arrival=timestamp,isl=input_length,osl=output_length{ids}{unit} (`columns` of [trace])"
            )
        } else {
            String::new()
        };
        let shown: String = value.to_string().chars().take(40).collect();
        return Some(format!("`{name}` is {shown}, but must be {must}{hint}"));
    }
    let ids = object.get("hash_ids").filter(|ids| !ids.is_null())?;
    let Some(ids) = ids.as_array() else {
        return Some("`hash_ids` is not a list of whole numbers".to_owned());
    };
    let at = ids.iter().position(|id| !id.is_u64())?;
    Some(format!(
        "`hash_ids` has {} as its id {at}, but ids are whole numbers from 0 to 2^64 - 1",
        ids[at]
    ))
}

pub(crate) fn parse_json<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    serde_json::from_slice(bytes).map_err(|e| {
        // serde reports "line 1" for the single line that it parses; only the column helps.
        let text = e.to_string();
        let text = text.split(" at line ").next().unwrap_or_default();
        format!("{text} (column {})", e.column())
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::fmt::Write as _;

    use proptest::prelude::*;
    use slipstream_base::SimTime;
    use slipstream_config::workload_file::{Arrival, Content, TimeUnit, TraceFile, Workload};

    use crate::Request;
    use crate::trace::Trace;

    /// A request as it is meant: `parent` is the request that it continues.
    #[derive(Clone, Debug)]
    struct Meant {
        ms: u64,
        isl: u32,
        osl: u32,
        ids: Vec<u64>,
        parent: Option<usize>,
    }

    /// A request as a trace's reader gives it: due time in µs, lengths, and its prompt's blocks.
    type Got = (u64, u32, u32, Vec<(u32, u32)>);

    /// Requests sorted by time; some continue one that no other has continued.
    fn meant() -> impl Strategy<Value = Vec<Meant>> {
        let one = (
            0u64..200_000,
            1u32..200,
            1u32..300,
            any::<prop::sample::Index>(),
            any::<bool>(),
        );
        prop::collection::vec(one, 1..12).prop_map(|drawn| {
            let (mut ms, mut all) = (0, Vec::<Meant>::new());
            for (at, (gap, isl, osl, of, continues)) in drawn.into_iter().enumerate() {
                ms += if at == 0 { 0 } else { gap };
                let of = (at > 0 && continues).then(|| of.index(at.max(1)));
                let parent = of.filter(|of| all.iter().all(|other| other.parent != Some(*of)));
                let before = parent.map_or(Vec::new(), |of| all[of].ids.clone());
                let isl = isl + parent.map_or(0, |of| all[of].isl);
                let ids = (0..isl.div_ceil(16) as usize)
                    .map(|id| match before.get(id) {
                        Some(same) if id + 1 < before.len() => *same,
                        _ => 1000 * (at as u64 + 1) + id as u64,
                    })
                    .collect();
                all.push(Meant {
                    ms,
                    isl,
                    osl,
                    ids,
                    parent,
                });
            }
            all
        })
    }

    /// The first request of the session of each.
    fn roots(all: &[Meant]) -> Vec<usize> {
        let mut roots = Vec::new();
        for (at, one) in all.iter().enumerate() {
            roots.push(one.parent.map_or(at, |of| roots[of]));
        }
        roots
    }

    fn seconds(ms: u64) -> String {
        format!("{}.{:03}", ms / 1000, ms % 1000)
    }

    /// An object with its members in an order that depends on `turn`.
    fn object(turn: usize, mut members: Vec<String>) -> String {
        let len = members.len();
        members.rotate_left(turn % len);
        format!("{{{}}}\n", members.join(", "))
    }

    /// All turns of all sessions, by session and turn, each answered at once.
    fn read(text: &str, file: &TraceFile) -> Vec<Vec<Got>> {
        let workload = Workload {
            arrival: Arrival::Trace,
            content: Content::Trace(file.clone()),
            ..Workload::default()
        };
        let mut trace = Trace::new(text.as_bytes(), &workload, file, 0);
        let mut sessions = Vec::new();
        let mut names = HashMap::new();
        while let Some(first) = trace.next() {
            let mut next = Some(first.unwrap());
            let mut turns = Vec::new();
            while let Some(request) = next {
                turns.push(got(&request, &mut names));
                next = trace.follow_up(&request, request.output_len, SimTime(0));
            }
            sessions.push(turns);
        }
        sessions
    }

    fn got(request: &Request, names: &mut HashMap<String, u32>) -> Got {
        let segments = request.prompt.segments().iter().map(|segment| {
            let new = names.len() as u32;
            let name = format!("{:?}", segment.content);
            (*names.entry(name).or_insert(new), segment.tokens)
        });
        let us = (request.due.0 + 500) / 1000;
        (
            us,
            request.prompt.tokens(),
            request.output_len,
            segments.collect(),
        )
    }

    /// The same from the meant requests. `sessions`: the format has them; `ids`: it has ids.
    fn oracle(all: &[Meant], sessions: bool, ids: bool) -> Vec<Vec<Got>> {
        let roots = roots(all);
        let mut names = HashMap::new();
        let mut out = Vec::new();
        for root in 0..all.len() {
            let turns = (0..all.len()).filter(|at| {
                if sessions {
                    roots[*at] == root
                } else {
                    *at == root
                }
            });
            let turns: Vec<Got> = turns
                .map(|at| {
                    let one = &all[at];
                    let mut left = one.isl;
                    let segments = one.ids.iter().map(|id| {
                        let new = names.len() as u32;
                        let tokens = left.min(16);
                        left -= tokens;
                        (*names.entry(*id).or_insert(new), tokens)
                    });
                    let segments = if ids { segments.collect() } else { Vec::new() };
                    (one.ms * 1000, one.isl, one.osl, segments)
                })
                .collect();
            if !turns.is_empty() {
                out.push(turns);
            }
        }
        out
    }

    /// Without the blocks, for formats that have no ids.
    fn lengths(mut sessions: Vec<Vec<Got>>) -> Vec<Vec<Got>> {
        for turn in sessions.iter_mut().flatten() {
            turn.3.clear();
        }
        sessions
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if std::env::var("PROPTEST_CASES").is_ok() {
            ProptestConfig::default().cases
        } else {
            64
        }))]

        /// The same requests, written in each format, are read to the same requests.
        #[test]
        fn a_trace_is_the_same_in_each_format(
            all in meant(),
            turn in 0usize..8,
            first_id in 0u64..1_000_000,
            begin_s in 0u64..1_000_000,
            unit in prop::sample::select(TimeUnit::NAMES.to_vec()),
        ) {
            let roots = roots(&all);
            let (mut mooncake, mut bailian, mut named) = (String::new(), String::new(), String::new());
            let mut azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n".to_owned();
            let mut burst = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n".to_owned();
            let mut table = "who,out,when,in\n".to_owned();
            for (at, one) in all.iter().enumerate() {
                let Meant { ms, isl, osl, ids, parent } = one;
                let lengths = [format!("\"input_length\": {isl}"), format!("\"output_length\": {osl}")];
                let ids = format!("\"hash_ids\": {ids:?}");
                let mut members = vec![format!("\"timestamp\": {ms}"), ids.clone()];
                members.push(format!("\"session_id\": {}", roots[at]));
                members.extend(lengths.clone());
                mooncake += &object(turn, members);
                let mut members = vec![format!("\"timestamp\": {}", seconds(*ms)), ids];
                members.push(format!("\"chat_id\": {}", first_id + at as u64));
                let parent = parent.map_or("-1".into(), |of| (first_id + of as u64).to_string());
                members.push(format!("\"parent_chat_id\": {parent}"));
                members.push("\"type\": \"text\", \"turn\": 1".into());
                members.extend(lengths);
                bailian += &object(turn, members);
                let (s, day) = (ms / 1000 % 86_400, 1 + ms / 86_400_000);
                let (h, m, sec, rest) = (s / 3600, s / 60 % 60, s % 60, ms % 1000);
                writeln!(azure, "2023-11-{day:02} {h:02}:{m:02}:{sec:02}.{rest:03}0000,{isl},{osl}").unwrap();
                let time = seconds(ms + begin_s * 1000);
                writeln!(burst, "{time},GPT-4,{isl},{osl},{},API log", isl + osl).unwrap();
                let time = match unit.1 {
                    TimeUnit::S => time,
                    TimeUnit::Ms => (ms + begin_s * 1000).to_string(),
                    TimeUnit::Us => ((ms + begin_s * 1000) * 1000).to_string(),
                    TimeUnit::Ns => ((ms + begin_s * 1000) * 1_000_000).to_string(),
                };
                writeln!(table, "u{},{osl},{time},{isl}", roots[at]).unwrap();
                let members = [("when", time), ("in", isl.to_string()), ("out", osl.to_string())];
                let mut members: Vec<_> = members.iter().map(|(k, v)| format!("\"{k}\": {v}")).collect();
                members.push(format!("\"who\": \"u{}\"", roots[at]));
                named += &object(turn, members);
            }
            let known = TraceFile { path: "t".into(), ..TraceFile::default() };
            let per_16 = TraceFile { tokens_per_id: Some(16), ..known.clone() };
            let own = TraceFile {
                unit: Some(unit.1),
                columns: Some("arrival=when,isl=in,osl=out,session=who".parse().unwrap()),
                ..known.clone()
            };
            let with_ids = oracle(&all, true, true);
            prop_assert_eq!(read(&mooncake, &per_16), with_ids.clone());
            prop_assert_eq!(read(&bailian, &known), with_ids);
            let sessions = oracle(&all, true, false);
            prop_assert_eq!(lengths(read(&named, &own)), sessions.clone());
            prop_assert_eq!(lengths(read(&table, &own)), sessions);
            let alone = oracle(&all, false, false);
            prop_assert_eq!(lengths(read(&azure, &known)), alone.clone());
            prop_assert_eq!(lengths(read(&burst, &known)), alone);
        }
    }

    fn error(text: &str, file: &TraceFile) -> String {
        let workload = Workload {
            arrival: Arrival::Trace,
            content: Content::Trace(file.clone()),
            ..Workload::default()
        };
        let mut trace = Trace::new(text.as_bytes(), &workload, file, 0);
        trace.find_map(Result::err).expect("an error").to_string()
    }

    #[test]
    fn messages_have_the_values_of_the_file() {
        let known = TraceFile {
            path: "t".into(),
            ..TraceFile::default()
        };
        let own = |columns: &str| TraceFile {
            columns: Some(columns.parse().unwrap()),
            ..known.clone()
        };
        let burst = "Timestamp,Model,Request tokens,Response tokens\n";
        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
        let bailian = |time: &str| {
            format!(
                "{{\"chat_id\": 1, \"timestamp\": {time}, \"input_length\": 4, \"output_length\": 1}}\n"
            )
        };
        for (text, file, says) in [
            (
                format!("{burst}15,GPT-4,3,4\n10.25,GPT-4,3,4\n"),
                &known,
                "`Timestamp` 10.25 is before the line above it (15)",
            ),
            (
                format!("{azure}2023-11-16 18:00:02.5,3,4\n2023-11-16 18:00:01,3,4\n"),
                &known,
                "`TIMESTAMP` 2023-11-16 18:00:01 is before the line above it (2023-11-16 18:00:02.5)",
            ),
            (
                bailian("61.5") + &bailian("61.25").replace("\"chat_id\": 1", "\"chat_id\": 2"),
                &known,
                "`timestamp` 61.25 is before the line above it (61.5)",
            ),
            (
                format!("{burst}15,GPT-4,0,4\n"),
                &known,
                "`Request tokens` is 0",
            ),
            (
                "at,in,out\n5,1,1\n".into(),
                &own("arrival=at,isl=in,osl=out"),
                "`at` is 5, whose unit is not known; state it with --trace-unit",
            ),
            (
                "at,in,out\n5,1,1\n".into(),
                &own("arrival=when,isl=in,osl=out"),
                "the header has no column `when`, which --trace-columns names; it has `at`, `in`, `out`",
            ),
            (
                "{\"at\": 5, \"in\": 1}\n".into(),
                &known,
                "an object with `at`, `in`, which is no known format; name its fields with --trace-columns",
            ),
        ] {
            let error = error(&text, file);
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn fields_of_other_types_are_named() {
        let known = TraceFile {
            path: "t".into(),
            ..TraceFile::default()
        };
        let good = [
            ("timestamp", "5"),
            ("input_length", "600"),
            ("output_length", "5"),
            ("hash_ids", "[0, 1]"),
        ];
        for (field, value, hint) in [
            ("input_length", "600.0", "--trace-unit ms"),
            ("input_length", "\"600\"", "--trace-columns"),
            ("output_length", "5e0", "osl=output_length,ids=hash_ids"),
            (
                "timestamp",
                "\"2026-01-01T00:00:00.250\"",
                "--trace-columns",
            ),
            ("timestamp", "\"5\"", "--trace-unit ms"),
            ("timestamp", "[5]", "must be a number"),
            ("input_length", "-1", "a whole number"),
            ("input_length", "1000000000000000000", "4,294,967,295"),
            ("output_length", "true", "a whole number"),
            ("hash_ids", "[0, -1]", "-1 as its id 1"),
            ("hash_ids", "[\"a\", 1]", "\"a\" as its id 0"),
            ("hash_ids", "7", "not a list"),
        ] {
            for chats in ["", "\"chat_id\": 1, "] {
                let members: Vec<String> = good
                    .iter()
                    .map(|(name, usual)| {
                        let value = if *name == field { value } else { *usual };
                        format!("\"{name}\": {value}")
                    })
                    .collect();
                let error = error(&format!("{{{chats}{}}}\n", members.join(", ")), &known);
                assert!(error.contains(&format!("`{field}`")), "{error}");
                assert!(error.contains(hint), "{error}");
                // What the hint says works.
                if hint.contains("--trace") && !value.contains("5e0") && chats.is_empty() {
                    assert!(error.contains("arrival=timestamp"), "{error}");
                }
            }
        }
        let session = |part: &str| {
            format!(
                "{{\"timestamp\": 0, \"turns\": [{{\"add\": [{part}], \"output_length\": 1}}]}}\n"
            )
        };
        for part in [
            "[1]",
            "[1, 2, \"user\", 3]",
            "[\"a\", 2]",
            "7",
            "[1, 2.5]",
            "[1, 2, \"robot\"]",
        ] {
            let error = error(&session(part), &known);
            assert!(
                error.contains("[NAME, TOKENS]") && !error.contains("SegmentLine"),
                "{error}"
            );
        }
    }

    #[test]
    fn times_out_of_range_are_shown_as_the_file_has_them() {
        let named = TraceFile {
            path: "t".into(),
            columns: Some("arrival=t,isl=p,osl=a".parse().unwrap()),
            unit: Some(TimeUnit::S),
            ..TraceFile::default()
        };
        let error = error("t,p,a\n0,5,5\n9e12,5,5\n", &named);
        assert!(error.contains("`t` is 9e12, but"), "{error}");
    }

    /// Days are those of the Gregorian calendar: as many as the months of 400 years have.
    #[test]
    fn dates_that_no_calendar_has_are_refused() {
        let mut days = 0;
        for year in 2000..2400 {
            for month in 1..=12 {
                for day in 1..=32 {
                    let date = format!("{year}-{month:02}-{day:02} 00:00:00");
                    let Some(ms) = super::date_ms(&date) else {
                        continue;
                    };
                    assert_eq!(ms, (10_957.0 + f64::from(days)) * 86_400e3, "{date}");
                    days += 1;
                }
            }
        }
        assert_eq!(days, 146_097);
        for date in [
            "2023-02-29",
            "2026-04-31",
            "2100-02-29",
            "2024-13-40",
            "2024-05-00",
        ] {
            assert_eq!(super::date_ms(&format!("{date} 00:00:00")), None, "{date}");
        }
    }

    /// A chat that two continue: the second is a session of its own.
    #[test]
    fn a_branch_is_a_session() {
        let line = |chat: u32, parent: i32, time: u32| {
            format!(
                "{{\"chat_id\": {chat}, \"parent_chat_id\": {parent}, \"timestamp\": {time}, \
                 \"input_length\": 4, \"output_length\": 1, \"hash_ids\": [1]}}\n"
            )
        };
        let text =
            line(1, -1, 0) + &line(2, 1, 1) + &line(3, 1, 2) + &line(4, 3, 3) + &line(5, 99, 4);
        let known = TraceFile {
            path: "t".into(),
            ..TraceFile::default()
        };
        let turns: Vec<usize> = read(&text, &known).iter().map(Vec::len).collect();
        assert_eq!(turns, [2, 2, 1]);
    }
}
