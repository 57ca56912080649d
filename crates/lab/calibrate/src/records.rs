//! Requests of one engine as their client saw them, from a file.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, bail, ensure};

use slipstream_base::width::to_usize;
use slipstream_os::files;

use crate::Note;

/// One answered request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredRequest {
    /// When it was sent, s.
    pub arrival_s: f64,
    /// Tokens of the prompt.
    pub input: u32,
    /// Of those, found in the KV cache.
    pub cached: u32,
    /// Tokens of the answer.
    pub output: u32,
    /// From then to the first token, s.
    pub ttft_s: f64,
    /// From then to the last token, s.
    pub e2e_s: f64,
    /// The part of the measurement, from 0.
    pub part: usize,
}

impl MeasuredRequest {
    /// When its first token came, s.
    pub(crate) fn first_s(&self) -> f64 {
        self.arrival_s + self.ttft_s
    }

    /// When its last token came, s.
    pub(crate) fn last_s(&self) -> f64 {
        self.arrival_s + self.e2e_s
    }

    /// Mean time per output token after the first, s.
    pub(crate) fn tpot_s(&self) -> Option<f64> {
        (self.output > 1).then(|| (self.e2e_s - self.ttft_s) / f64::from(self.output - 1))
    }

    /// Prompt tokens that were computed.
    pub(crate) fn computed(&self) -> u32 {
        (self.input - self.cached.min(self.input)).max(1)
    }
}

/// Times, each with its unit as the end of the column's name.
const UNITS: [(&str, f64); 4] = [("_ns", 1e-9), ("_us", 1e-6), ("_ms", 1e-3), ("_s", 1.0)];
const ARRIVAL: &[&str] = &["arrival", "sent", "timestamp"];
const TTFT: &[&str] = &["ttft", "time_to_first_token"];
const E2E: &[&str] = &["e2e", "e2e_latency", "latency"];
const INPUT: &[&str] = &["isl", "input_tokens", "prompt_tokens", "input_length"];
const OUTPUT: &[&str] = &["osl", "output_tokens", "completion_tokens", "output_length"];
const CACHED: &[&str] = &["cached_tokens"];

/// Requests in a file at most: each is simulated some hundred times.
const RECORDS_MAX: usize = 100_000;

/// The requests of `path`: drag records, CSV, or JSON Lines.
///
/// # Errors
/// It cannot be read, or a line of it is no request.
pub fn read(path: &Path, note: Note<'_>) -> anyhow::Result<Vec<MeasuredRequest>> {
    let text = files::read_text(path).with_context(|| format!("reading {}", path.display()))?;
    parse(&text, note).with_context(|| path.display().to_string())
}

/// A row of a file: its line, and what it has by name.
type Row = (usize, BTreeMap<String, String>);

pub(crate) fn parse(text: &str, note: Note<'_>) -> anyhow::Result<Vec<MeasuredRequest>> {
    let rows = if text.trim_start().starts_with('{') {
        json_rows(text)?
    } else {
        csv_rows(text)?
    };
    ensure!(
        rows.len() <= RECORDS_MAX,
        "{} requests; at most {RECORDS_MAX} are read: cut the file",
        rows.len()
    );
    let mut records = Vec::with_capacity(rows.len());
    let mut failed = 0;
    for (line, row) in &rows {
        let is_failure = |status: &String| !status.is_empty() && status != "ok";
        if row.get("status").is_some_and(is_failure) {
            failed += 1;
            continue;
        }
        records.push(record(row).with_context(|| format!("line {line}"))?);
    }
    if failed > 0 {
        note(&format!(
            "{failed} requests left out: their `status` is not \"ok\""
        ));
    }
    checked(records)
}

/// The earliest `due` of the answered requests of drag records, s.
pub(crate) fn first_due(text: &str) -> anyhow::Result<f64> {
    let rows = csv_rows(text)?;
    let answered = rows
        .iter()
        .filter(|(_, row)| row.get("status").is_some_and(|status| status == "ok"));
    let dues = answered.filter_map(|(_, row)| row.get("due")?.parse::<u64>().ok());
    Ok(dues.min().unwrap_or(0) as f64 / 1e9)
}

fn csv_rows(text: &str) -> anyhow::Result<Vec<Row>> {
    let mut reader = csv::ReaderBuilder::new()
        .comment(Some(b'#'))
        .trim(csv::Trim::All)
        .from_reader(text.as_bytes());
    let names = reader.headers()?.clone();
    let mut rows = Vec::new();
    for row in reader.records() {
        let row = row?;
        let line = row.position().map_or(0, |at| to_usize(at.line()));
        let cells = names.iter().zip(&row).filter(|(_, cell)| !cell.is_empty());
        let cells = cells.map(|(name, cell)| (name.to_owned(), cell.to_owned()));
        rows.push((line, cells.collect()));
    }
    Ok(rows)
}

fn json_rows(text: &str) -> anyhow::Result<Vec<Row>> {
    let lines = text.lines().enumerate();
    lines
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(at, line)| {
            let object: serde_json::Map<String, serde_json::Value> =
                serde_json::from_str(line).with_context(|| format!("line {}", at + 1))?;
            let cells = object.into_iter().filter(|(_, value)| !value.is_null());
            let cells = cells.map(|(name, value)| {
                let text = value.as_str().map(str::to_owned);
                (name, text.unwrap_or_else(|| value.to_string()))
            });
            Ok((at + 1, cells.collect()))
        })
        .collect()
}

fn record(row: &BTreeMap<String, String>) -> anyhow::Result<MeasuredRequest> {
    // Stages of a drag record are moments in ns, not durations.
    if row.contains_key("client_recv") || row.contains_key("last_client_recv") {
        let stage = |name: &str| -> anyhow::Result<f64> {
            let cell = row
                .get(name)
                .with_context(|| format!("`{name}` is empty"))?;
            let ns: u64 = cell
                .parse()
                .with_context(|| format!("`{name}` is {cell:?}, not a time in ns"))?;
            Ok(ns as f64 / 1e9)
        };
        let (due, first, last) = (
            stage("due")?,
            stage("client_recv")?,
            stage("last_client_recv")?,
        );
        return Ok(MeasuredRequest {
            arrival_s: due,
            input: count(row, INPUT)?,
            cached: 0,
            output: count(row, OUTPUT)?,
            ttft_s: first - due,
            e2e_s: last - due,
            part: 0,
        });
    }
    let cached = if CACHED.iter().any(|name| row.contains_key(*name)) {
        count(row, CACHED)?
    } else {
        0
    };
    Ok(MeasuredRequest {
        arrival_s: seconds(row, ARRIVAL)?,
        input: count(row, INPUT)?,
        cached,
        output: count(row, OUTPUT)?,
        ttft_s: seconds(row, TTFT)?,
        e2e_s: seconds(row, E2E)?,
        part: 0,
    })
}

fn count(row: &BTreeMap<String, String>, names: &[&str]) -> anyhow::Result<u32> {
    let found = names.iter().find_map(|name| Some((name, row.get(*name)?)));
    let (name, cell) = found.with_context(|| format!("none of the columns {}", words(names)))?;
    cell.parse()
        .with_context(|| format!("`{name}` is {cell:?}, not a number of tokens"))
}

fn seconds(row: &BTreeMap<String, String>, names: &[&str]) -> anyhow::Result<f64> {
    for name in names {
        for (unit, factor) in UNITS {
            let column = format!("{name}{unit}");
            if let Some(cell) = row.get(&column) {
                let value: f64 = cell
                    .parse()
                    .with_context(|| format!("`{column}` is {cell:?}, not a number"))?;
                return Ok(value * factor);
            }
        }
        if row.contains_key(*name) {
            bail!(
                "`{name}` has no unit; call it `{name}_s`, `{name}_ms`, `{name}_us` or `{name}_ns`"
            );
        }
    }
    bail!(
        "no column `{}_ms`, or another unit; the names are {}",
        names[0],
        words(names)
    )
}

fn words(names: &[&str]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    quoted.join(", ")
}

/// `records` in the order of their arrival, if every one is possible.
///
/// # Errors
/// A record contradicts itself.
pub fn checked(mut records: Vec<MeasuredRequest>) -> anyhow::Result<Vec<MeasuredRequest>> {
    /// A day: longer is another unit.
    const LONGEST_S: f64 = 86_400.0;
    for (at, r) in records.iter().enumerate() {
        let place = format!("request {} (sent at {} s)", at + 1, r.arrival_s);
        ensure!(
            [r.arrival_s, r.ttft_s, r.e2e_s]
                .iter()
                .all(|x| x.is_finite()),
            "{place}: a time is not finite"
        );
        ensure!(
            r.ttft_s > 0.0 && r.arrival_s >= 0.0,
            "{place}: TTFT is {} s; both times must be positive",
            r.ttft_s
        );
        ensure!(
            r.e2e_s >= r.ttft_s,
            "{place}: E2E {} s is below TTFT {} s; do the columns have the units of their names?",
            r.e2e_s,
            r.ttft_s
        );
        ensure!(
            r.e2e_s <= LONGEST_S,
            "{place}: E2E is {} s, more than a day; does the column have the unit of its name?",
            r.e2e_s
        );
        ensure!(
            r.input > 0 && r.output > 0,
            "{place}: a prompt and an answer have at least one token"
        );
        ensure!(
            r.cached <= r.input,
            "{place}: {} cached tokens of a prompt of {}",
            r.cached,
            r.input
        );
    }
    records.sort_by(|a, b| a.arrival_s.total_cmp(&b.arrival_s));
    let first = records.first().map_or(0.0, |r| r.arrival_s);
    for record in &mut records {
        record.arrival_s -= first;
    }
    Ok(records)
}

/// Refuses records that cannot show the terms, and names the missing part.
pub(crate) fn enough(records: &[MeasuredRequest]) -> anyhow::Result<()> {
    const LEAST: usize = 20;
    /// Prompts of one length, and those of two, differ by at least this.
    const SPREAD: f64 = 1.5;
    ensure!(
        records.len() >= LEAST,
        "{} answered requests; at least {LEAST} are needed: record for longer, or raise --max-duration",
        records.len()
    );
    let mut inputs: Vec<u32> = records.iter().map(MeasuredRequest::computed).collect();
    inputs.sort_unstable();
    let (short, long) = (inputs[inputs.len() / 10], inputs[inputs.len() * 9 / 10]);
    ensure!(
        f64::from(long) >= SPREAD * f64::from(short),
        "prompts have {short} to {long} computed tokens, too much alike to tell the time per prompt token from the \
         rest: add requests with prompts at least {SPREAD} times as long"
    );
    ensure!(
        records.iter().filter(|r| r.output > 3).count() >= LEAST / 2,
        "hardly any answer has more than three tokens, so no step of a decode was seen: add longer answers"
    );
    let most = most_at_once(records);
    ensure!(
        most >= 2,
        "no two requests were answered at the same time, so the time per sequence is not seen: send at least two at \
         once, such as `slipstream bench --concurrency 8`; if they were, check the unit of the arrival column"
    );
    let steps: Vec<f64> = records.iter().filter_map(MeasuredRequest::tpot_s).collect();
    let middle = slipstream_perf::fit::quantile(&steps, 0.5);
    ensure!(
        (1e-6..=60.0).contains(&middle),
        "the median time per output token is {middle} s; do the columns have the units of their names?"
    );
    Ok(())
}

/// Most requests that had tokens at the same time.
pub(crate) fn most_at_once(records: &[MeasuredRequest]) -> usize {
    let mut events: Vec<(f64, i32)> = records
        .iter()
        .filter(|r| r.output > 1)
        .flat_map(|r| [(r.first_s(), 1), (r.last_s(), -1)])
        .collect();
    // Ends first where they meet.
    events.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut now = 0;
    let counts = events.iter().map(|(_, change)| {
        now += change;
        now
    });
    usize::try_from(counts.max().unwrap_or(0)).unwrap_or(0)
}

/// Names of parts, and the part of each record.
pub struct Parts {
    /// Their names.
    pub names: Vec<String>,
    /// The part of each record.
    pub of: Vec<usize>,
}

/// Five parts of equal numbers of requests, one after the other.
pub fn fifths(records: &[MeasuredRequest]) -> Parts {
    const PARTS: usize = 5;
    Parts {
        names: (1..=PARTS)
            .map(|p| format!("fifth {p} of the requests"))
            .collect(),
        of: (0..records.len())
            .map(|i| i * PARTS / records.len())
            .collect(),
    }
}

/// The parts that the records name.
pub fn by_part(records: &[MeasuredRequest], names: Vec<String>) -> Parts {
    Parts {
        names,
        of: records.iter().map(|r| r.part).collect(),
    }
}

/// `records` in a form that [`read`] takes.
pub fn csv(records: &[MeasuredRequest]) -> String {
    let mut text = "arrival_s,input_tokens,cached_tokens,output_tokens,ttft_ms,e2e_ms\n".to_owned();
    for r in records {
        let _ = writeln!(
            text,
            "{:.6},{},{},{},{:.4},{:.4}",
            r.arrival_s,
            r.input,
            r.cached,
            r.output,
            r.ttft_s * 1e3,
            r.e2e_s * 1e3
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "arrival_s,input_tokens,output_tokens,ttft_ms,e2e_ms\n";

    #[track_caller]
    fn refused(text: &str, part: &str) {
        let error = parse(text, &|_| ())
            .and_then(|records| enough(&records))
            .unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains(part), "{error}");
    }

    #[test]
    fn forms_of_the_same_request_are_equal() {
        let csv = parse(
            &format!("{HEAD}2.5,100,7,50,350\n3,100,7,50,350\n"),
            &|_| (),
        )
        .unwrap();
        let json = "{\"timestamp_ms\": 500, \"prompt_tokens\": 100, \"completion_tokens\": 7, \"ttft_s\": 0.05, \
                    \"latency_us\": 350000}\n";
        let json = parse(json, &|_| ()).unwrap();
        let drag = "id,due,client_recv,last_client_recv,isl,osl,status\n\
                    0.0,1000,50001000,350001000,100,7,ok\n1.0,1,,,100,,timeout\n";
        let drag = parse(drag, &|_| ()).unwrap();
        assert_eq!((csv.len(), json.len(), drag.len()), (2, 1, 1));
        for r in [csv[0], json[0], drag[0]] {
            assert_eq!((r.arrival_s, r.input, r.output), (0.0, 100, 7));
            assert!((r.ttft_s - 0.05).abs() < 1e-9 && (r.e2e_s - 0.35).abs() < 1e-9);
        }
        assert_eq!(csv[1].arrival_s, 0.5);
        // Kept records can be read again.
        assert_eq!(parse(&super::csv(&csv), &|_| ()).unwrap(), csv);
    }

    #[test]
    fn times_that_cannot_be_are_refused_with_their_place() {
        for (row, part) in [
            ("0,100,7,-50,350", "TTFT is -0.05 s"),
            ("0,100,7,NaN,350", "not finite"),
            ("0,100,7,50,inf", "not finite"),
            ("0,100,7,350,50", "below TTFT"),
            ("0,100,7,50,90000000", "more than a day"),
            ("0,0,7,50,350", "at least one token"),
            ("0,100,0,50,350", "at least one token"),
            ("-1,100,7,50,350", "must be positive"),
            ("0,1e9,7,50,350", "line 2: `input_tokens` is \"1e9\""),
            ("0,100,7,soon,350", "line 2: `ttft_ms` is \"soon\""),
        ] {
            refused(&format!("{HEAD}{row}\n"), part);
        }
        refused(
            "arrival_s,isl,osl,ttft,e2e_ms\n0,1,1,1,1\n",
            "`ttft` has no unit",
        );
        refused("arrival_s,isl,osl,e2e_ms\n0,1,1,1\n", "no column `ttft_ms`");
        refused(
            "arrival_s,osl,ttft_ms,e2e_ms\n0,1,1,1\n",
            "none of the columns `isl`",
        );
        refused("{\"arrival_s\": 1\n", "line 1");
        refused("", "0 answered requests");
    }

    /// 40 requests, two at a time, unless `change` makes them otherwise.
    fn some(change: impl Fn(usize, &mut MeasuredRequest)) -> Vec<MeasuredRequest> {
        let record = |i: usize| {
            let mut record = MeasuredRequest {
                arrival_s: (i / 2) as f64,
                input: 100 + 50 * (i as u32 % 5),
                cached: 0,
                output: 20,
                ttft_s: 0.05,
                e2e_s: 0.9,
                part: 0,
            };
            change(i, &mut record);
            record
        };
        checked((0..40).map(record).collect()).unwrap()
    }

    #[test]
    fn too_little_data_is_refused_by_name() {
        enough(&some(|_, _| ())).unwrap();
        let cases: [(Vec<MeasuredRequest>, &str); 5] = [
            (some(|_, _| ())[..19].to_vec(), "at least 20"),
            (some(|_, r| r.input = 100), "too much alike"),
            (some(|_, r| r.output = 1), "add longer answers"),
            (some(|i, r| r.arrival_s = i as f64), "at the same time"),
            (
                some(|_, r| (r.ttft_s, r.e2e_s) = (5e-8, 9e-7)),
                "median time per output token",
            ),
        ];
        for (records, part) in &cases {
            let error = enough(records).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn prompts_found_in_the_cache_count_by_what_was_computed() {
        let cached =
            some(|i, r| (r.input, r.cached) = (100 + 50 * (i as u32 % 5), 50 * (i as u32 % 5)));
        assert!(
            enough(&cached)
                .unwrap_err()
                .to_string()
                .contains("too much alike")
        );
        assert_eq!(most_at_once(&cached), 2);
    }
}
