//! Checks whether the times of a trace are plausible in their unit.

use std::io::{BufRead, BufReader, Read};

use slipstream_config::workload_file::{Arrival, Content, TraceFile, Workload};

use crate::form::Form;
use crate::trace::LINE_BYTES_MAX;

/// Number of requests examined, from the first.
const REQUESTS_MAX: usize = 1000;
/// Number of bytes examined.
const BYTES_MAX: u64 = 64 << 20;
/// Minimum number of gaps for a meaningful mean.
const GAPS_MIN: usize = 9;
/// Requests per second above which the unit is doubted: no published trace of one model has as many.
const RATE_MAX: f64 = 2000.0;
/// Mean gap above which the unit is doubted, s: a service under load has shorter ones.
const GAP_MAX_S: f64 = 1000.0;

/// Returns a warning if the first requests of the workload's trace come so densely, or so far apart, that the
/// unit of its times is probably wrong. `None` also if its times do not set the arrivals, or the trace is not a
/// regular file, which could not be read twice.
pub fn note(workload: &Workload) -> Option<String> {
    let Content::Trace(file) = &workload.content else {
        return None;
    };
    let regular = std::fs::metadata(&file.path).is_ok_and(|of| of.is_file());
    if !matches!(workload.arrival, Arrival::Trace) || !regular {
        return None;
    }
    let opened = std::fs::File::open(&file.path).ok()?;
    of_lines(BufReader::new(opened.take(BYTES_MAX)), file)
}

fn of_lines(mut reader: impl BufRead, file: &TraceFile) -> Option<String> {
    let mut form: Option<Form> = None;
    let mut times = Vec::new();
    let mut line = Vec::new();
    for _ in 0..=REQUESTS_MAX {
        line.clear();
        let limit = LINE_BYTES_MAX;
        if (&mut reader)
            .take(limit)
            .read_until(b'\n', &mut line)
            .ok()?
            == 0
        {
            break;
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let form = if let Some(form) = &mut form {
            form
        } else {
            let (found, _) = Form::of(&line, file).ok()?;
            match form.insert(found) {
                // Written by Slipstream: the unit is known.
                Form::Sessions | Form::Record => return None,
                Form::Csv(_) => continue,
                other => other,
            }
        };
        // A line that cannot be read is reported when the trace is.
        if let Ok(request) = form.parse(&line, file) {
            times.extend(request.timestamp);
        }
    }
    let gaps = times.len().saturating_sub(1);
    if gaps < GAPS_MIN {
        return None;
    }
    let span_s = (times[gaps] - times[0]) / 1e3;
    let what = if span_s > 0.0 && gaps as f64 / span_s > RATE_MAX {
        format!("{:.0} requests per second", gaps as f64 / span_s)
    } else if span_s / gaps as f64 > GAP_MAX_S {
        format!("{:.0} s between two requests", span_s / gaps as f64)
    } else {
        return None;
    };
    Some(format!(
        "{}: its first {} requests come at {what} on average; if its times are in another unit, state it with \
         --trace-unit s, ms, us or ns (`unit` of [trace])",
        file.path.display(),
        times.len()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use slipstream_config::workload_file::TimeUnit;

    fn of(line: impl Fn(u64) -> String, head: &str, unit: Option<TimeUnit>) -> Option<String> {
        let file = TraceFile {
            path: "t".into(),
            unit,
            ..TraceFile::default()
        };
        let text = (0..50).map(line).collect::<String>();
        of_lines(format!("{head}{text}").as_bytes(), &file)
    }

    #[test]
    fn spacing_of_another_unit_gets_a_note() {
        let json = |step: f64| {
            move |at: u64| {
                let time = at as f64 * step;
                format!("{{\"timestamp\": {time}, \"input_length\": 5, \"output_length\": 5}}\n")
            }
        };
        // Five requests per second, whose times are in s, ms, µs and ns.
        let dense = of(json(0.2), "", None).unwrap();
        assert!(
            dense.contains("first 50 requests come at 5000 requests per second"),
            "{dense}"
        );
        assert_eq!(of(json(0.2), "", Some(TimeUnit::S)), None);
        assert_eq!(of(json(200.0), "", None), None);
        assert_eq!(of(json(2e5), "", None), None); // a request per 200 s can be meant
        let sparse = of(json(2e8), "", None).unwrap();
        assert!(sparse.contains("200000 s between two requests"), "{sparse}");
        assert_eq!(of(json(2e8), "", Some(TimeUnit::Ns)), None);
        let burst = "Timestamp,Request tokens,Response tokens\n";
        let ms = of(|at| format!("{},3,4\n", at * 2_000_000), burst, None).unwrap();
        assert!(ms.contains("--trace-unit"), "{ms}");
        assert_eq!(of(|at| format!("{},3,4\n", at * 2), burst, None), None);
    }
}
