//! `[trace]`: requests from a file.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::doc::{Section, Table, choice, optional, optional_choice, required_path, section};

section! {
    /// `[trace]`
    pub struct TraceFile, keys TraceKeys of "trace", read in order {
        /// A file in any of the known formats, or one whose fields `columns` names.
        field path: PathBuf = PathBuf::new() => |t: &Table<'_>| TraceKeys::file().read(t);
        /// The trace, in any of the known formats; a relative path starts at the workload file.
        key file: PathBuf = required_path("set the JSONL file: `file = \"trace.jsonl\"`").with_default_text("required");
        /// Handling of a line that is not a request: `"stop"` exits with an error that names the line, `"skip"` counts
        /// it and continues.
        ///
        /// `"skip"`: a file in another format is skipped almost whole.
        on_bad_line: OnBadLine = choice(&[("stop", OnBadLine::Stop), ("skip", OnBadLine::Skip)], OnBadLine::Stop);
        /// Tokens per entry of `hash_ids`.
        ///
        /// Other than recorded: shared prefixes are shorter or longer than they were.
        tokens_per_id?: u32 = optional().within(1..=1_000_000)
            .unit("tokens").with_default_text("the format's: 16 for Qwen-Bailian's, otherwise 512");
        /// Unit of numeric times.
        ///
        /// Wrong: requests arrive a thousand times too fast or too slowly.
        unit?: TimeUnit = optional_choice(&TimeUnit::NAMES).with_default_text("the format's");
        /// Names of its fields; `None`: those of a known format.
        field columns: Option<TraceColumns> = None => read_columns;
        /// Names of the fields of a trace in another format, [below](#other-formats).
        key columns?: String = optional().with_description("`KEY=NAME,…`").with_default_text("those of a known format");
    }
}

fn read_columns(t: &Table<'_>) -> Option<TraceColumns> {
    let text = TraceKeys::columns().read(t)?;
    let wrong = |error: String| {
        t.error(
            "columns",
            format!("`columns`: {error}"),
            "write for example `columns = \"arrival=Timestamp,isl=Prompt,osl=Answer\"`",
        );
    };
    text.parse().map_err(wrong).ok()
}

pub(super) fn read_trace(t: &Table<'_>) -> TraceFile {
    TraceFile::read(t)
}

/// Unit of a trace's times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeUnit {
    /// Seconds.
    S,
    /// Milliseconds.
    Ms,
    /// Microseconds.
    Us,
    /// Nanoseconds.
    Ns,
}

impl TimeUnit {
    /// Names of the units, as in files and flags.
    pub const NAMES: [(&'static str, TimeUnit); 4] = [
        ("s", TimeUnit::S),
        ("ms", TimeUnit::Ms),
        ("us", TimeUnit::Us),
        ("ns", TimeUnit::Ns),
    ];

    /// Length in ms.
    pub fn ms(self) -> f64 {
        match self {
            TimeUnit::S => 1e3,
            TimeUnit::Ms => 1.0,
            TimeUnit::Us => 1e-3,
            TimeUnit::Ns => 1e-6,
        }
    }

    /// In words, in the plural.
    pub fn word(self) -> &'static str {
        match self {
            TimeUnit::S => "seconds",
            TimeUnit::Ms => "milliseconds",
            TimeUnit::Us => "microseconds",
            TimeUnit::Ns => "nanoseconds",
        }
    }
}

impl fmt::Display for TimeUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = TimeUnit::NAMES.into_iter().find(|(_, unit)| unit == self);
        f.write_str(name.map_or("", |(name, _)| name))
    }
}

impl FromStr for TimeUnit {
    type Err = String;
    fn from_str(text: &str) -> Result<TimeUnit, String> {
        let found = TimeUnit::NAMES.into_iter().find(|(name, _)| *name == text);
        found
            .map(|(_, unit)| unit)
            .ok_or_else(|| format!("`{text}` is not a unit of time: use s, ms, us or ns"))
    }
}

/// Names of a trace's fields, written as `arrival=NAME,isl=NAME,osl=NAME`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TraceColumns {
    /// Arrival time: a date, or a number in the trace's unit. `None`: it has none.
    pub arrival: Option<String>,
    /// Tokens of the prompt.
    pub isl: String,
    /// Tokens of the answer.
    pub osl: String,
    /// Name of the session of which a request is a turn.
    pub session: Option<String>,
    /// Name of the model.
    pub model: Option<String>,
    /// List of ids of the prompt's parts, as `hash_ids`.
    pub hash_ids: Option<String>,
}

impl TraceColumns {
    /// The names in the file.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let optional = [&self.arrival, &self.session, &self.model, &self.hash_ids];
        let optional = optional.into_iter().filter_map(|name| name.as_deref());
        [&*self.isl, &*self.osl].into_iter().chain(optional)
    }
}

impl fmt::Display for TraceColumns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "isl={},osl={}", self.isl, self.osl)?;
        for (key, name) in [
            ("arrival", &self.arrival),
            ("session", &self.session),
            ("model", &self.model),
            ("ids", &self.hash_ids),
        ] {
            if let Some(name) = name {
                write!(f, ",{key}={name}")?;
            }
        }
        Ok(())
    }
}

impl FromStr for TraceColumns {
    type Err = String;
    fn from_str(text: &str) -> Result<TraceColumns, String> {
        let [
            mut arrival,
            mut isl,
            mut osl,
            mut session,
            mut model,
            mut ids,
        ] = [const { None }; 6];
        for part in text.split(',') {
            let (key, name) = part
                .split_once('=')
                .filter(|(_, name)| !name.trim().is_empty())
                .ok_or_else(|| format!("`{part}` is not KEY=NAME, such as isl=ContextTokens"))?;
            let (key, name) = (key.trim(), name.trim().to_owned());
            let slot = match key {
                "arrival" => &mut arrival,
                "isl" => &mut isl,
                "osl" => &mut osl,
                "session" => &mut session,
                "model" => &mut model,
                "ids" => &mut ids,
                other => {
                    return Err(format!(
                        "`{other}` is not a field of a request: use arrival, isl, osl, session, model and ids"
                    ));
                }
            };
            if slot.replace(name).is_some() {
                return Err(format!("`{key}` is named twice"));
            }
        }
        Ok(TraceColumns {
            arrival,
            isl: isl.ok_or("`isl`, the tokens of the prompt, is not named")?,
            osl: osl.ok_or("`osl`, the tokens of the answer, is not named")?,
            session,
            model,
            hash_ids: ids,
        })
    }
}

/// Handling of a trace's line that is not a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnBadLine {
    /// End the run with an error that names the line.
    #[default]
    Stop,
    /// Count it and continue.
    Skip,
}
