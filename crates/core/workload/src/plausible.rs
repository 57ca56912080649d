//! Examines the first lines of a trace before it is replayed: whether its times are plausible in their unit, and
//! which of its fields are not read.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};

use slipstream_config::workload_file::{Arrival, Content, TimeUnit, TraceFile, Workload};

use crate::form::{Form, LINE_BYTES_MAX, Names, UNIT, UNIT_KEY, parse_json};

/// Number of requests examined, from the first.
const REQUESTS_MAX: usize = 1000;
/// Number of bytes examined.
const BYTES_MAX: u64 = 64 << 20;
/// Minimum number of gaps for a meaningful mean.
const GAPS_MIN: usize = 9;
/// The same if times are fractions of a millisecond, which is evidence by itself.
const FRACTION_GAPS_MIN: usize = 2;
/// Requests per second above which a stated unit is doubted: no published trace of one model has as many.
const RATE_MAX: f64 = 2000.0;
/// Mean gap above which a unit is doubted, s: a service under load has shorter ones.
const GAP_MAX_S: f64 = 1000.0;
/// Unread fields that are named.
const UNREAD_MAX: usize = 12;

/// Findings in the first lines of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Examined {
    /// Why its times are almost certainly in another unit than its format's.
    pub refusal: Option<String>,
    /// Doubts, and fields that are not read.
    pub notes: Vec<String>,
}

/// Bounds within which the rate of a trace is plausible, requests per second. Times in seconds that are read as
/// milliseconds come 1,000 times as densely: loads of 0.05 to 200 requests per second become 50 to 200,000.
struct Bounds {
    /// Below this, the trace is refused.
    refuse_below: f64,
    note_below: f64,
    note_above: f64,
    refuse_above: f64,
}

/// The unit was stated: nothing is refused.
const STATED: Bounds = Bounds {
    refuse_below: 0.0,
    note_below: 1.0 / GAP_MAX_S,
    note_above: RATE_MAX,
    refuse_above: f64::INFINITY,
};
/// Whole milliseconds of a format that means milliseconds.
const WHOLE_MS: Bounds = Bounds {
    refuse_below: 1.0 / GAP_MAX_S,
    note_below: 0.25,
    note_above: 40.0,
    refuse_above: 900.0,
};
/// Fractions of milliseconds: recorded times rarely have them, and times in seconds nearly always.
const FRACTIONS_OF_MS: Bounds = Bounds {
    note_above: 20.0,
    refuse_above: 200.0,
    ..WHOLE_MS
};
/// Seconds of a format that means seconds.
const SECONDS: Bounds = Bounds {
    refuse_below: 1.0 / GAP_MAX_S,
    note_below: 0.25,
    note_above: RATE_MAX,
    refuse_above: f64::INFINITY,
};
/// Columns of BurstGPT's published files, which begin with a request per minute.
const BURST: Bounds = Bounds {
    refuse_below: 1e-4,
    ..SECONDS
};
/// Requests per second of a whole file with BurstGPT's columns, above which its beginning may have fewer: the published
/// files have 0.27, and milliseconds that are read as seconds at most 0.2, up to 200 requests per second.
const BURST_RATE_MIN: f64 = 0.21;
/// [`BURST`], of a file with at least [`BURST_RATE_MIN`].
const PUBLISHED_BURST: Bounds = Bounds {
    note_below: 1.0 / 150.0,
    ..BURST
};

/// Bytes of the end of a file that are examined.
const TAIL_BYTES: u64 = 1 << 16;

/// Examines the first requests of the workload's trace. Empty also if the trace is not a regular file, which could
/// not be read twice.
pub fn examine(workload: &Workload) -> Examined {
    let Content::Trace(file) = &workload.content else {
        return Examined::default();
    };
    if !std::fs::metadata(&file.path).is_ok_and(|of| of.is_file()) {
        return Examined::default();
    }
    let Ok(mut opened) = File::open(&file.path) else {
        return Examined::default();
    };
    let follows_times = matches!(workload.arrival, Arrival::Trace);
    let end = End::of(&mut opened).unwrap_or_default();
    of_lines(
        BufReader::new(opened.take(BYTES_MAX)),
        file,
        follows_times,
        &end,
    )
}

/// The end of a file.
#[derive(Default)]
struct End {
    /// Bytes of the whole file.
    len: u64,
    /// Its last bytes.
    tail: Vec<u8>,
}

impl End {
    fn of(file: &mut File) -> std::io::Result<End> {
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(TAIL_BYTES)))?;
        let mut tail = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut tail)?;
        file.seek(SeekFrom::Start(0))?;
        Ok(End { len, tail })
    }

    /// Time of the last request, ms, and the mean length of a line there.
    fn last(&self, form: &mut Form, file: &TraceFile) -> Option<(f64, f64)> {
        let lines: Vec<&[u8]> = self.tail.split(|byte| *byte == b'\n').collect();
        let of = |line: &&[u8]| form.parse(line, file).ok()?.timestamp;
        let time = lines.iter().rev().find_map(of)?;
        Some((time, self.tail.len() as f64 / lines.len() as f64))
    }
}

/// The examined lines.
#[derive(Default)]
struct Lines {
    /// ms, as read.
    times: Vec<f64>,
    /// Times that are no whole numbers in the file.
    fractions: usize,
    /// Delays above 0, ms.
    delays: Vec<f64>,
    /// Fields that are not read, and how often they occur.
    unread: BTreeMap<String, usize>,
    /// Some request has `hash_ids`.
    has_ids: bool,
    /// The file has no further lines.
    complete: bool,
    /// The file states the unit of its times, as `slipstream trace convert` writes it.
    states_unit: bool,
    /// Requests per second of the whole file, if its times are in its format's unit.
    whole: Option<f64>,
}

fn of_lines(
    mut reader: impl BufRead,
    file: &TraceFile,
    follows_times: bool,
    end: &End,
) -> Examined {
    let mut form: Option<(Form, Names)> = None;
    let mut lines = Lines::default();
    let (mut bytes, mut count) = (0, 0_u32);
    let mut line = Vec::new();
    for index in 0..=REQUESTS_MAX {
        line.clear();
        let read = (&mut reader)
            .take(LINE_BYTES_MAX)
            .read_until(b'\n', &mut line);
        match read {
            Err(_) => return Examined::default(),
            Ok(0) => {
                lines.complete = true;
                break;
            }
            Ok(_) => {}
        }
        if index == 0 && line.starts_with(b"\xef\xbb\xbf") {
            line.drain(..3);
        }
        (bytes, count) = (bytes + line.len(), count + 1);
        if line.trim_ascii().is_empty() {
            continue;
        }
        let form = if let Some((form, _)) = &mut form {
            form
        } else {
            let Ok(found) = Form::of(&line, file) else {
                return Examined::default(); // reported when the trace is read
            };
            let (form, _) = form.insert(found);
            match form {
                Form::Record => return Examined::default(),
                Form::Csv(csv) => {
                    let unread = csv.unread().map(|name| (name.to_owned(), 1));
                    lines.unread.extend(unread);
                    continue;
                }
                other => other,
            }
        };
        if let Some(known) = form.known() {
            let object = parse_json::<serde_json::Map<String, serde_json::Value>>(&line);
            for (name, value) in object.unwrap_or_default() {
                if name == UNIT_KEY && value == UNIT {
                    lines.states_unit = matches!(form, Form::Json);
                } else if !known.contains(&name.as_str()) {
                    *lines.unread.entry(name).or_default() += 1;
                }
            }
        }
        if matches!(form, Form::Sessions) {
            continue; // written by Slipstream: the unit is known
        }
        // A line that cannot be read is reported when the trace is.
        if let Ok(request) = form.parse(&line, file) {
            lines.times.extend(request.timestamp);
            lines.has_ids |= request.hash_ids.is_some();
            lines
                .delays
                .extend(request.delay.filter(|delay| *delay > 0.0));
            let written = request.written.and_then(|text| text.parse::<f64>().ok());
            lines.fractions += usize::from(written.is_some_and(|time| time.fract() != 0.0));
        }
    }
    let Some((mut form, names)) = form else {
        return Examined::default();
    };
    if let (Some(first), Some((last, tail_line))) = (lines.times.first(), end.last(&mut form, file))
        && last > *first
    {
        // Lines of one end may be longer than those of the other.
        let line = tail_line.min(bytes as f64 / f64::from(count.max(1)));
        lines.whole = Some(end.len as f64 / line / ((last - first) / 1e3));
    }
    let mut examined = if follows_times {
        lines.unit(&form, file)
    } else {
        Examined::default()
    };
    examined.notes.extend(lines.unread(&form, &names, file));
    examined
}

/// How to state the unit.
const STATE_UNIT: &str = "--trace-unit s, ms, us or ns (`unit` of [trace])";

impl Lines {
    /// Compares the times with what is plausible in the unit of `form`.
    fn unit(&self, form: &Form, file: &TraceFile) -> Examined {
        let mut examined = Examined::default();
        let of_ms = matches!(form, Form::Json);
        let fractional = of_ms && self.fractions * 5 >= self.times.len().max(1);
        let (bounds, unit) = match form {
            _ if file.unit.is_some() => (STATED, file.unit.expect("it is some")),
            Form::Json if self.states_unit => return examined,
            Form::Json if fractional => (FRACTIONS_OF_MS, TimeUnit::Ms),
            Form::Json => (WHOLE_MS, TimeUnit::Ms),
            Form::Csv(csv) if csv.has_dates() => return examined,
            Form::Csv(csv) if csv.is_published_burst() => {
                let published = self.whole.is_some_and(|rate| rate >= BURST_RATE_MIN);
                let bounds = if published { PUBLISHED_BURST } else { BURST };
                (bounds, TimeUnit::S)
            }
            Form::Bailian(_) | Form::Csv(_) => (SECONDS, TimeUnit::S),
            // Dates, since numbers need a unit.
            _ => return examined,
        };
        let name = file.path.display();
        let gaps = self.times.len().saturating_sub(1);
        let (first, last) = self
            .times
            .iter()
            .fold((f64::MAX, f64::MIN), |(first, last), time| {
                (first.min(*time), last.max(*time))
            });
        let span_s = (last - first) / 1e3;
        let enough = if fractional {
            FRACTION_GAPS_MIN
        } else {
            GAPS_MIN
        };
        // Requests of one moment are a batch.
        if gaps >= enough && span_s > 0.0 {
            let rate = gaps as f64 / span_s;
            let what = if rate < bounds.note_below {
                format!("{} s between two requests", rounded(1.0 / rate))
            } else {
                format!("{} requests per second", rounded(rate))
            };
            let with = if fractional {
                ", with fractions of a millisecond,"
            } else {
                ""
            };
            let seen = format!(
                "{name}: its first {} requests come at {what} on average{with}",
                self.times.len()
            );
            let brief =
                of_ms && self.complete && file.unit.is_none() && gaps >= GAPS_MIN && span_s < 3.0;
            if rate < bounds.refuse_below || rate > bounds.refuse_above {
                examined.refusal = Some(format!(
                    "{seen} if its times are in {unit}, as in others of its format; state their unit with {STATE_UNIT}"
                ));
            } else if rate < bounds.note_below || rate > bounds.note_above || brief {
                examined.notes.push(format!(
                    "{seen} if its times are in {unit}; if they are in another unit, state it with {STATE_UNIT}"
                ));
            }
        }
        let mean = self.delays.iter().sum::<f64>() / self.delays.len().max(1) as f64;
        if of_ms && file.unit.is_none() && self.delays.len() >= 3 && mean < 20.0 {
            examined.notes.push(format!(
                "{name}: its delays between turns are {} ms on average; if times are in another unit, state it with \
                 {STATE_UNIT}",
                rounded(mean)
            ));
        }
        examined
    }

    /// A note about fields that are not read.
    fn unread(&self, form: &Form, names: &Names, file: &TraceFile) -> Option<String> {
        if self.unread.is_empty() {
            return None;
        }
        let mut listed: Vec<String> = self
            .unread
            .keys()
            .take(UNREAD_MAX)
            .map(|field| format!("`{field}`"))
            .collect();
        if self.unread.len() > UNREAD_MAX {
            listed.push("…".into());
        }
        let mut note = format!("{}: not read: {}", file.path.display(), listed.join(", "));
        if matches!(form, Form::Sessions) {
            return Some(note);
        }
        // Fields by the words of their names: a session, or ids of blocks.
        let find = |words: &[&str]| {
            let of = |field: &&String| {
                let field = field.to_ascii_lowercase();
                words.iter().any(|word| field.contains(word))
            };
            self.unread.keys().find(of)
        };
        let session = find(&["session", "conversation", "chat", "dialog"]);
        let ids = find(&["hash", "block"]).filter(|_| !matches!(form, Form::Csv(_)));
        if session.is_none() && ids.is_none() {
            note.push_str(
                "; to read other fields, name them with --trace-columns (`columns` of [trace])",
            );
            return Some(note);
        }
        let mut columns = format!(
            "arrival={},isl={},osl={}",
            names.time, names.input, names.output
        );
        for (key, field) in [("session", session), ("ids", ids)] {
            if let Some(field) = field {
                columns = format!("{columns},{key}={field}");
            }
        }
        if ids.is_none() && self.has_ids {
            columns.push_str(",ids=hash_ids");
        }
        if columns.contains(|c: char| !c.is_ascii_alphanumeric() && !",=_-.".contains(c)) {
            columns = format!("'{columns}'");
        }
        let unit = match form {
            Form::Json => " --trace-unit ms",
            Form::Csv(csv) if csv.has_dates() => "",
            _ => " --trace-unit s",
        };
        note = format!(
            "{note}; to read them, use --trace-columns {columns}{unit} (`columns` of [trace])"
        );
        Some(note)
    }
}

/// `value` with two or three significant digits.
fn rounded(value: f64) -> String {
    let places = if value >= 10.0 { 0 } else { 2 };
    format!("{value:.places$}")
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use proptest::prelude::*;

    use super::*;

    fn with(text: &str, unit: Option<TimeUnit>) -> Examined {
        let file = TraceFile {
            path: "t".into(),
            unit,
            ..TraceFile::default()
        };
        let tail = text.as_bytes();
        let end = End {
            len: tail.len() as u64,
            tail: tail[tail.len().saturating_sub(1 << 16)..].to_vec(),
        };
        of_lines(tail, &file, true, &end)
    }

    fn json(times: impl IntoIterator<Item = String>) -> String {
        times.into_iter().fold(String::new(), |mut text, time| {
            writeln!(
                text,
                "{{\"timestamp\": {time}, \"input_length\": 5, \"output_length\": 5}}"
            )
            .unwrap();
            text
        })
    }

    const BURST_HEADER: &str =
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n";

    fn steps(step: f64) -> String {
        json((0..50).map(|at| (f64::from(at) * step).to_string()))
    }

    fn noted(of: &Examined) -> bool {
        of.refusal.is_none() && of.notes.len() == 1
    }

    #[test]
    fn spacing_of_another_unit_is_noted_or_refused() {
        // Five requests per second, whose times are in s, ms, µs and ns.
        let refusal = with(&steps(0.2), None).refusal.unwrap();
        assert!(
            refusal.contains("5000 requests per second on average, with fractions")
                && refusal.contains("--trace-unit s, ms, us or ns"),
            "{refusal}"
        );
        assert_eq!(with(&steps(200.0), None), Examined::default());
        assert!(noted(&with(&steps(2e5), None)));
        assert!(with(&steps(2e8), None).refusal.is_some());
        for (step, unit) in [(0.2, TimeUnit::S), (2e5, TimeUnit::Us), (2e8, TimeUnit::Ns)] {
            assert_eq!(with(&steps(step), Some(unit)), Examined::default());
        }
        // A wrong unit that was stated is noted only.
        assert!(noted(&with(&steps(0.2), Some(TimeUnit::Ms))));
        // A request per second in whole seconds.
        assert!(with(&steps(1.0), None).refusal.is_some());
        // A batch has no rate.
        assert_eq!(with(&steps(0.0), None), Examined::default());
        let three = json(["0.5", "1.7", "2.6"].map(str::to_owned));
        assert!(with(&three, None).refusal.is_some());
        let bom = format!("\u{feff}{}", steps(0.2));
        assert!(with(&bom, None).refusal.is_some());
        let delays = "{\"session_id\": 1, \"timestamp\": 0, \"delay\": 2.5, \"input_length\": 5, \"output_length\": 5}\n";
        let delays = with(&delays.repeat(4), None);
        assert!(
            noted(&delays) && delays.notes[0].contains("2.50 ms"),
            "{delays:?}"
        );
    }

    #[test]
    fn real_traces_have_no_note() {
        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
        let azure = (0..60).fold(azure.to_owned(), |text, at| {
            format!("{text}2023-11-16 18:15:{at:02}.6805900,374,44\n")
        });
        // As BurstGPT's files: about a request per minute at the beginning, and 0.27 per second in all.
        let burst = BURST_HEADER.to_owned();
        let burst = (0..30_000).fold(burst, |text, at| {
            let time = 5 + at * if at < 1500 { 61 } else { 3 };
            format!("{text}{time},ChatGPT,472,18,490,Conversation log\n")
        });
        let bailian = (0..60).fold(String::new(), |text, at| {
            format!(
                "{text}{{\"chat_id\": {at}, \"parent_chat_id\": -1, \"timestamp\": {}, \"input_length\": 4, \
                 \"output_length\": 1, \"type\": \"text\", \"turn\": 1, \"hash_ids\": [1]}}\n",
                f64::from(at) * 0.153
            )
        });
        for text in [azure, burst, bailian] {
            assert_eq!(with(&text, None), Examined::default(), "{text}");
        }
        let data = std::env::var_os("SLIPSTREAM_DATA").map_or_else(
            || concat!(env!("CARGO_MANIFEST_DIR"), "/../../../../shared/data").into(),
            std::path::PathBuf::from,
        );
        let path = data.join("mooncake/conversation_trace.jsonl");
        if !path.exists() {
            eprintln!("skipped: no {}", path.display());
            return;
        }
        let workload = Workload {
            arrival: Arrival::Trace,
            content: Content::Trace(TraceFile {
                path,
                ..TraceFile::default()
            }),
            ..Workload::default()
        };
        assert_eq!(examine(&workload), Examined::default());
    }

    #[test]
    fn unread_fields_are_named_with_the_flag_that_reads_them() {
        let line = |more: &str| {
            format!("{{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 5{more}}}\n")
        };
        let note = |text: &str| with(text, None).notes.concat();
        for (more, says) in [
            (
                ", \"conversation_id\": 3, \"turn\": 1, \"hash_ids\": [1]",
                "t: not read: `conversation_id`; to read them, use --trace-columns \
                 arrival=timestamp,isl=input_length,osl=output_length,session=conversation_id,ids=hash_ids \
                 --trace-unit ms (",
            ),
            (
                ", \"hash_id\": [1], \"colour\": 1",
                "t: not read: `colour`, `hash_id`; to read them, use --trace-columns \
                 arrival=timestamp,isl=input_length,osl=output_length,ids=hash_id --trace-unit ms (",
            ),
            (
                ", \"colour\": 1",
                "t: not read: `colour`; to read other fields",
            ),
        ] {
            let found = note(&line(more));
            assert!(found.contains(says), "{found}");
        }
        let burst = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n";
        let found = note(burst);
        assert!(
            found.contains(
                "not read: `Session ID`; to read them, use --trace-columns 'arrival=Timestamp,isl=Request \
                 tokens,osl=Response tokens,session=Session ID' --trace-unit s ("
            ),
            "{found}"
        );
        assert_eq!(
            note(&line(
                ", \"request_id\": 1, \"priority\": 2, \"model\": \"m\""
            )),
            ""
        );
        // Also if its times are not followed.
        let file = TraceFile::default();
        let line = line(", \"colour\": 1");
        let notes = of_lines(line.as_bytes(), &file, false, &End::default()).notes;
        assert_eq!(notes.len(), 1);
    }

    /// Times of a load of `rate` requests per second: `count` of them, with exponential or even gaps, s.
    fn load() -> impl Strategy<Value = (f64, Vec<f64>)> {
        let gaps = proptest::collection::vec(0.001_f64..1.0, 30..200);
        (-3.0_f64..5.3, any::<bool>(), gaps).prop_map(|(power, even, draws)| {
            let rate = (0.05_f64.ln() + (power + 3.0) / 8.3 * (200.0_f64 / 0.05).ln()).exp();
            let mut at = 0.0;
            let mut times: Vec<f64> = draws
                .iter()
                .map(|draw| {
                    at += if even { 1.0 } else { -draw.ln() } / rate;
                    at
                })
                .collect();
            // The rate that was drawn, not one of its tail's.
            let scale = (times.len() - 1) as f64 / rate / (at - times[0]);
            for time in &mut times {
                *time *= scale;
            }
            (rate, times)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if std::env::var("PROPTEST_CASES").is_ok() {
            ProptestConfig::default().cases
        } else {
            64
        }))]

        /// Times that are read in another unit are never taken silently, and those in the right one silently over
        /// the range of rates in which that can be told.
        #[test]
        fn no_load_is_read_in_another_unit_silently(
            (rate, times) in load(), unit in 0..4_usize, places in 0..4_usize
        ) {
            let unit = [TimeUnit::S, TimeUnit::Ms, TimeUnit::Us, TimeUnit::Ns][unit];
            let write = |time: f64, places: usize| format!("{:.places$}", time * 1e3 / unit.ms());
            let found = with(&json(times.iter().map(|time| write(*time, places))), None);
            let spoken = found.refusal.is_some() || !found.notes.is_empty();
            let written: std::collections::BTreeSet<_> =
                times.iter().map(|time| write(*time, places)).collect();
            if written.len() < 2 {
                // One moment, in any unit.
            } else if unit != TimeUnit::Ms {
                prop_assert!(spoken, "{rate} {unit}: {found:?}");
                // Fractions with steps of a second's size, and gaps of hours.
                let sure = unit == TimeUnit::Ns && rate < 900.0 || unit == TimeUnit::S && rate > 1.1;
                prop_assert!(!sure || found.refusal.is_some(), "{rate} {unit}: {found:?}");
            } else if (0.26..19.0).contains(&rate) && times.len() as f64 / rate > 3.5 {
                prop_assert!(!spoken, "{rate}: {found:?}");
            } else if rate < 180.0 {
                prop_assert!(found.refusal.is_none(), "{rate}: {found:?}");
            }
            let text = json(times.iter().map(|time| write(*time, places)));
            prop_assert_eq!(with(&text, Some(unit)), Examined::default());
            // Formats in seconds.
            let table = |header: &str, rest: &str| {
                times.iter().fold(header.to_owned(), |text, time| format!("{text}{}{rest}\n", write(*time, 3)))
            };
            let burst = table("Timestamp,Request tokens,Response tokens\n", ",4,5");
            let published = table(BURST_HEADER, ",GPT-4,4,5,9,API log");
            let bailian = times.iter().fold(String::new(), |text, time| {
                format!("{text}{{\"chat_id\": 1, \"timestamp\": {}, \"input_length\": 4, \"output_length\": 1}}\n", write(*time, 3))
            });
            for text in [burst, published, bailian] {
                let found = with(&text, None);
                let spoken = found.refusal.is_some() || !found.notes.is_empty();
                if unit != TimeUnit::S {
                    prop_assert!(spoken, "{rate} {unit}: {found:?}");
                } else if rate > 0.26 {
                    prop_assert!(!spoken, "{rate}: {found:?}");
                }
            }
        }

        /// What `slipstream trace convert --to mooncake` writes is read back without a word, at any rate.
        #[test]
        fn our_own_conversion_is_not_doubted(
            power in -2.0_f64..5.0, requests in 1..60_u64, scale in 0.01_f64..100.0, turns in 1..4_u32
        ) {
            let text = format!(
                "isl = 40\nosl = 4\nrequests = {requests}\ntime_scale = {scale}\nsession.turns = {turns}\n\
                 session.think_time_s = 0.001\n[arrival]\nkind = \"poisson\"\nrate_per_s = {}\n",
                10_f64.powf(power)
            );
            let doc = slipstream_config::doc::Doc::parse("w.toml", text.as_bytes());
            let (workload, _) = slipstream_config::workload_file::read(doc).unwrap();
            let mut source = crate::Source::open(&workload, 0).unwrap();
            let mut writer = crate::mooncake::MooncakeWriter::new(16, turns > 1);
            let mut out = Vec::new();
            while let Some(first) = source.next() {
                writer.write_session(&mut out, &source, first.unwrap(), workload.time_scale).unwrap();
            }
            let out = String::from_utf8(out).unwrap();
            prop_assert_eq!(with(&out, None), Examined::default(), "{}", out);
        }
    }
}
