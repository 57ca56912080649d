//! `slipstream top`: a server's workers or engines, live in a terminal.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{IsTerminal, Read, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use rustix::termios::{self, LocalModes, OptionalActions, SpecialCodeIndex, Termios};
use serde_json::Value;
use slipstream_base::text::{brief, foreign};
use slipstream_base::width::to_u8;
use slipstream_probe::Client;

use super::client_args::ClientArgs;
use crate::cmd::workload_args::time;
use crate::out;

/// Flags of `slipstream top`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The server, such as http://127.0.0.1:8000; `q` quits
    url: String,
    /// Print one table, with the rates of one interval, and end; so does output that is no terminal
    #[arg(long)]
    once: bool,
    /// Print the figures of the table as JSON and end: counters since the start, without rates
    #[arg(long)]
    json: bool,
    /// Interval of updates
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "1s")]
    interval: Duration,
    #[command(flatten)]
    client: ClientArgs,
}

/// Time limit of each question.
const ASK: Duration = Duration::from_secs(5);

/// Shows the fleet until `q`.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let client = args.client.client(&args.url)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let look = || runtime.block_on(look(&client));
    if args.json {
        let figures = look()?;
        out::print_json(&format!("{}\n", serde_json::to_string_pretty(&figures)?))?;
        return Ok(ExitCode::SUCCESS);
    }
    let is_terminal = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    if args.once || !is_terminal {
        let before = look()?;
        std::thread::sleep(args.interval);
        out::print(&table(&args.url, &look()?, Some(&before)))?;
        return Ok(ExitCode::SUCCESS);
    }
    let _screen = Screen::open(args.interval)?;
    let mut before: Option<Value> = None;
    loop {
        match look() {
            Ok(figures) => {
                Screen::show(&table(&args.url, &figures, before.as_ref()))?;
                before = Some(figures);
            }
            // It may be starting again.
            Err(error) => Screen::show(&format!("{}: {error:#}\n", foreign(&args.url)))?,
        }
        if Screen::quits()? {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// The server's figures, with the states of real engines.
async fn look(client: &Client) -> anyhow::Result<Value> {
    let answer = client.get("/ui.json", ASK).await?;
    let figures = serde_json::from_slice::<Value>(&answer.body).ok();
    let figures = figures.filter(|of| answer.status == 200 && of["totals"].is_object());
    let mut figures = figures.with_context(|| {
        format!(
            "this is no Slipstream server: GET /ui.json answers {}, without its figures; in front of another engine, \
             such as vLLM, run `slipstream serve --engine URL`, and give `top` the address that it prints",
            answer.status
        )
    })?;
    let health = client.get("/health", ASK).await?; // 503 has a body as well
    let health: Value = serde_json::from_slice(&health.body).unwrap_or_default();
    let states: BTreeMap<&str, &Value> = list(&health["engines"])
        .iter()
        .filter_map(|of| Some((of["url"].as_str()?, of)))
        .collect();
    if let Some(engines) = figures["engines"].as_array_mut() {
        for engine in engines {
            let known = engine["name"].as_str().and_then(|name| states.get(name));
            if let Some(known) = known {
                engine["state"] = known["state"].clone();
                engine["last_failure"] = known["last_failure"].clone();
                engine["role"] = known["role"].clone();
                engine["first_byte_ms"] = known["first_byte_ms"].clone();
                engine["between_ms"] = known["between_ms"].clone();
            }
        }
    }
    Ok(figures)
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A server's word in a table.
fn cell(word: &str) -> String {
    brief(word, 128).into_owned()
}

/// A count or a share; `-` if the server does not report it.
fn shown(value: &Value, digits: usize) -> String {
    value
        .as_f64()
        .map_or("-".into(), |of| format!("{of:.digits$}"))
}

/// `None` if there is nothing to share.
fn share(part: f64, all: f64) -> Option<f64> {
    (all > 0.0).then(|| part / all)
}

fn percent(share: Option<f64>) -> String {
    share.map_or("-".into(), |of| format!("{:.0}%", 100.0 * of))
}

/// The `q` quantile of a histogram since `before`, as its bucket's upper bound, s.
fn quantile(now: &Value, before: Option<&Value>, q: f64) -> String {
    let count = |of: &Value, at: usize| of["counts"][at].as_f64().unwrap_or(0.0);
    let counts: Vec<f64> = (0..list(&now["counts"]).len())
        .map(|at| count(now, at) - before.map_or(0.0, |of| count(of, at)))
        .collect();
    let all = counts.last().copied().unwrap_or(0.0);
    let Some(at) = counts
        .iter()
        .position(|&count| count >= q * all)
        .filter(|_| all > 0.0)
    else {
        return "-".into();
    };
    let seconds = |s: f64| {
        if s < 0.01 {
            format!("{:.2} ms", s * 1e3)
        } else if s < 1.0 {
            format!("{:.0} ms", s * 1e3)
        } else {
            format!("{s:.1} s")
        }
    };
    if let Some(bound) = now["bounds"][at].as_f64() {
        return format!("<= {}", seconds(bound));
    }
    let last = at.checked_sub(1).and_then(|at| now["bounds"][at].as_f64());
    format!("> {}", seconds(last.unwrap_or(0.0)))
}

/// The figures as text. Rates and latencies are those since `before`, or of all time.
fn table(url: &str, now: &Value, before: Option<&Value>) -> String {
    let mut text = totals(url, now, before);
    text.push('\n');
    let engines = list(&now["engines"]);
    // Names, roles and states to the left, numbers to the right.
    if engines.is_empty() {
        aligned(&worker_rows(list(&now["workers"])), 2, &mut text);
    } else {
        aligned(&engine_rows(engines), 3, &mut text);
    }
    for engine in engines.iter().filter(|of| of["ready"] != true) {
        if let Some(why) = engine["last_failure"].as_str() {
            let name = engine["name"].as_str().unwrap_or("?");
            let _ = writeln!(text, "{}: {}", cell(name), brief(why, out::LINE_CHARS_MAX));
        }
    }
    for (kind, count) in now["errors"].as_object().into_iter().flatten() {
        if count.as_f64().is_some_and(|count| count > 0.0) {
            let _ = writeln!(text, "{}: {}", cell(kind), shown(count, 0));
        }
    }
    text
}

/// Two lines: the sums of all workers or engines, and rates and latencies.
fn totals(url: &str, now: &Value, before: Option<&Value>) -> String {
    let mut text = String::new();
    let totals = &now["totals"];
    let since = |field: &str| {
        let total = |of: &Value| of["totals"][field].as_f64().unwrap_or(0.0);
        // A server that was started again counts from 0.
        before.map_or(total(now), |before| (total(now) - total(before)).max(0.0))
    };
    let ms = |of: &Value| of["at_ms"].as_f64().unwrap_or(0.0);
    let seconds = before
        .map(|before| (ms(now) - ms(before)) / 1e3)
        .filter(|&s| s > 0.0);
    let rate = |field: &str| {
        seconds.map_or("-".into(), |seconds| {
            format!("{:.1}", since(field) / seconds)
        })
    };
    // A router in front of real engines counts the blocks that it expects in their caches.
    let hit = [
        ("cached_tokens", "prompt_tokens"),
        ("hit_blocks", "prompt_blocks"),
    ];
    let hit = hit.map(|(hit, all)| share(since(hit), since(all)));
    let hit = hit.into_iter().flatten().next();
    let _ = writeln!(
        text,
        "{}  {}  {} running  {} waiting  {} errors",
        foreign(url),
        cell(now["model"].as_str().unwrap_or("real engines")),
        shown(&totals["running"], 0),
        shown(&totals["waiting"], 0),
        shown(&totals["errors"], 0),
    );
    let _ = writeln!(
        text,
        "requests/s {}  tokens/s {}  hit rate {}  TTFT p50 {} p99 {}  ITL p50 {} p99 {}",
        rate("requests"),
        rate("generation_tokens"),
        percent(hit),
        quantile(&now["ttft"], before.map(|of| &of["ttft"]), 0.5),
        quantile(&now["ttft"], before.map(|of| &of["ttft"]), 0.99),
        quantile(&now["itl"], before.map(|of| &of["itl"]), 0.5),
        quantile(&now["itl"], before.map(|of| &of["itl"]), 0.99),
    );
    text
}

/// A row of heads, and one for each modelled worker.
fn worker_rows(workers: &[Value]) -> Vec<Vec<String>> {
    let mut rows: Vec<Vec<String>> = Vec::new();
    let head = ["worker", "state", "running", "waiting", "KV use", "routed"];
    rows.push(head.map(str::to_owned).to_vec());
    for worker in workers {
        let state = if worker["ready"] == true {
            "up"
        } else {
            "down"
        };
        rows.push(vec![
            cell(worker["name"].as_str().unwrap_or("?")),
            state.into(),
            shown(&worker["running"], 0),
            shown(&worker["waiting"], 0),
            percent(worker["kv_used"].as_f64()),
            shown(&worker["routed"], 0),
        ]);
    }
    rows
}

/// A row of heads, and one for each real engine.
fn engine_rows(engines: &[Value]) -> Vec<Vec<String>> {
    let mut rows: Vec<Vec<String>> = Vec::new();
    rows.push(
        [
            "engine",
            "role",
            "state",
            "in flight",
            "requests",
            "failures",
            "hits",
            "first byte, ms",
            "between, ms",
            "prefills",
            "failed",
            "blocks",
        ]
        .map(str::to_owned)
        .to_vec(),
    );
    for engine in engines {
        let hits = engine["hit_blocks"].as_f64();
        let hits = hits.zip(engine["prompt_blocks"].as_f64());
        let ready = if engine["ready"] == true {
            "up"
        } else {
            "down"
        };
        rows.push(vec![
            cell(engine["name"].as_str().unwrap_or("?")),
            cell(engine["role"].as_str().unwrap_or("-")),
            cell(engine["state"].as_str().unwrap_or(ready)),
            shown(&engine["in_flight"], 0),
            shown(&engine["requests"], 0),
            shown(&engine["failures"], 0),
            percent(hits.and_then(|(hit, all)| share(hit, all))),
            shown(&engine["first_byte_ms"], 0),
            shown(&engine["between_ms"], 1),
            shown(&engine["prefills"], 0),
            shown(&engine["prefill_failures"], 0),
            shown(&engine["cached_blocks"], 0),
        ]);
    }
    rows
}

/// Appends `rows` as columns, the first `words` of them aligned to the left.
fn aligned(rows: &[Vec<String>], words: usize, text: &mut String) {
    // A column that no row fills says nothing.
    let filled = |at: usize| rows.iter().skip(1).any(|row| row[at] != "-");
    let columns: Vec<usize> = (0..rows[0].len())
        .filter(|&at| at < 2 || filled(at))
        .collect();
    let widths: Vec<usize> = columns
        .iter()
        .copied()
        .map(|at| {
            rows.iter()
                .map(|row| row[at].chars().count())
                .max()
                .unwrap_or(0)
        })
        .collect();
    for row in rows {
        let cells = columns.iter().zip(&widths).map(|(&at, &width)| {
            let cell = &row[at];
            if at < words {
                format!("{cell:<width$}")
            } else {
                format!("{cell:>width$}")
            }
        });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
}

/// A terminal without line editing; as it was before once this is dropped.
struct Screen {
    before: Termios,
}

impl Screen {
    /// Keys are waited for up to `interval`, 0.1 to 25.5 s.
    fn open(interval: Duration) -> anyhow::Result<Screen> {
        let before = termios::tcgetattr(std::io::stdin())?;
        let mut raw = before.clone();
        raw.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        raw.special_codes[SpecialCodeIndex::VMIN] = 0;
        let tenths = (interval.as_millis() / 100).clamp(1, 255);
        raw.special_codes[SpecialCodeIndex::VTIME] = to_u8(tenths);
        termios::tcsetattr(std::io::stdin(), OptionalActions::Now, &raw)?;
        let screen = Screen { before };
        out::print("\x1b[?1049h\x1b[?25l")?; // the other screen, no cursor
        Ok(screen)
    }

    fn show(text: &str) -> anyhow::Result<()> {
        let size = termios::tcgetwinsize(std::io::stdout());
        // 0: the terminal does not know.
        let known = size.ok().filter(|size| size.ws_row > 0 && size.ws_col > 0);
        let (rows, columns) = known.map_or((24, 80), |size| (size.ws_row, size.ws_col));
        let mut shown = String::from("\x1b[H");
        for line in text.lines().take(usize::from(rows.max(2)) - 1) {
            shown.extend(line.chars().take(usize::from(columns.max(1))));
            shown.push_str("\x1b[K\r\n");
        }
        shown.push_str("\x1b[J");
        out::print(&shown)?;
        Ok(())
    }

    /// Waits for a key up to the interval. True if it ends the display.
    fn quits() -> anyhow::Result<bool> {
        let mut keys = [0; 16];
        let count = std::io::stdin().read(&mut keys)?;
        // `q`, ^C, ^D
        Ok(keys[..count].iter().any(|key| matches!(key, b'q' | 3 | 4)))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = termios::tcsetattr(std::io::stdin(), OptionalActions::Now, &self.before);
        let mut stdout = std::io::stdout();
        let _ = stdout.write_all(b"\x1b[?25h\x1b[?1049l");
        let _ = stdout.flush();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn latencies_are_those_since_the_last_look() {
        let before = json!({"bounds": [0.1, 0.5, null], "counts": [100.0, 100.0, 100.0]});
        let now = json!({"bounds": [0.1, 0.5, null], "counts": [100.0, 109.0, 110.0]});
        assert_eq!(quantile(&now, None, 0.5), "<= 100 ms");
        assert_eq!(quantile(&now, Some(&before), 0.5), "<= 500 ms");
        assert_eq!(quantile(&now, Some(&before), 0.99), "> 500 ms");
        assert_eq!(quantile(&before, Some(&before), 0.5), "-");
        assert_eq!(quantile(&json!({}), None, 0.5), "-");
    }

    #[test]
    fn hits_in_front_of_real_engines_are_those_that_the_router_expects() {
        let figures = |hit: f64, all: f64| {
            json!({
                "totals": {"hit_blocks": hit, "prompt_blocks": all, "prompt_tokens": 0.0},
                "engines": [{"name": "http://a", "hit_blocks": hit, "prompt_blocks": all}],
            })
        };
        let text = table(
            "http://x",
            &figures(30.0, 100.0),
            Some(&figures(10.0, 60.0)),
        );
        assert!(text.contains("hit rate 50%"), "since the last look: {text}");
        assert!(
            text.contains(" 30%"),
            "of the engine, since the start: {text}"
        );
        let none = table("http://x", &figures(0.0, 0.0), None);
        assert!(none.contains("hit rate -"), "{none}");
    }

    #[test]
    fn a_name_cannot_control_the_terminal() {
        let figures = json!({
            "totals": {}, "errors": {"engine: \u{1b}[2J": 1.0},
            "engines": [{"name": "http://a\u{1b}]0;x\u{7}", "ready": false, "last_failure": "b\r\nc\u{9b}1m"}],
        });
        let text = table("http://x", &figures, None);
        assert!(
            text.chars().all(|c| c == '\n' || !c.is_control()),
            "{text:?}"
        );
        assert!(text.contains("down"));
    }
}
