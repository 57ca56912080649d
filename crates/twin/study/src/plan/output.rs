//! The answer as text, JSON and a page.

use std::fmt::Write as _;

use serde_json::{Value, json};
use slipstream_base::width;
use slipstream_plan::axes::{self, AXES};
use slipstream_plan::bound::Ideal;
use slipstream_plan::confidence::Share;
use slipstream_plan::search::LOAD_MAX;
use slipstream_plan::space;
use slipstream_report::html::Tile;
use slipstream_report::html::plan::{PlanAnswer, PlanPage};
use slipstream_report::latency::{P50, P99, cell};
use slipstream_report::table::{Table, counted, grouped, number};

use super::scaled::{Bounds, Scaled};
use super::{Asked, Excluded, Found, Interruption, NotFound, Row, Sensitivity, words};

/// A share in percent, with enough digits to tell it from the target. Rounded down, so that neither a
/// target nor all of the requests is claimed without being reached.
pub(super) fn digits(share: f64) -> String {
    let percent = 100.0 * share;
    let floor = |unit: f64| (percent * unit + 1e-6).floor() / unit;
    if (99.0..100.0).contains(&floor(100.0)) {
        format!("{:.2}", floor(100.0))
    } else {
        format!("{:.1}", floor(10.0))
    }
}

pub(super) fn percent(share: f64) -> String {
    format!("{} %", digits(share))
}

/// `98.3 to 100.0 %`.
fn range(sure: &Share) -> String {
    format!("{} to {}", digits(sure.low), percent(sure.high))
}

impl Row {
    /// Cost per hour, energy included.
    pub(super) fn per_hour(&self, context: &Asked) -> Option<f64> {
        context.priced.then_some(self.sized.cost)
    }

    fn output_tokens_per_s(&self) -> f64 {
        self.answer.outcome.totals.throughput().output_tokens_per_s
    }

    /// Cost of a million tokens of answers.
    fn per_million(&self, context: &Asked) -> Option<f64> {
        let rate = self.output_tokens_per_s();
        let cost = self.per_hour(context)?;
        (rate > 0.0).then(|| cost / (rate * 3600.0) * 1e6)
    }

    /// Power of all GPUs, W, at their limits.
    fn power_w(&self, context: &Asked) -> Option<f64> {
        Some(context.prices.power_w(&self.shape.gpu)? * self.gpus as f64)
    }

    /// Energy of a token of an answer, J, at most.
    fn joules_per_token(&self, context: &Asked) -> Option<f64> {
        let rate = self.output_tokens_per_s();
        let power = self.power_w(context)?;
        (rate > 0.0).then_some(power / rate)
    }

    fn setting_name(&self) -> String {
        self.setting.name()
    }
}

/// The objectives and the target, in words.
fn objective(context: &Asked) -> String {
    let headroom = if context.headroom > 0.0 {
        format!(" at {} % more load", number(100.0 * context.headroom))
    } else {
        String::new()
    };
    format!(
        "{} of requests within {}{headroom}",
        percent(context.target),
        context.objectives
    )
}

/// The workload in one line.
fn traffic(context: &Asked) -> String {
    let traffic = &context.traffic;
    let when = match (traffic.rate_per_s(), traffic.duration_s) {
        (Some(rate), Some(duration_s)) => {
            format!(" in {} s ({} per second)", number(duration_s), number(rate))
        }
        (None, Some(_)) => " at once".to_owned(),
        (_, None) => ", each as another one ends".to_owned(),
    };
    let [input, output] = traffic.lengths;
    let repeated = if traffic.repeated > 0.0 {
        format!(
            "{} of the prompt tokens repeat earlier ones",
            percent(traffic.repeated)
        )
    } else {
        "no prompt repeats another one".to_owned()
    };
    format!(
        "{}: {}{when}; prompts of {} and answers of {} tokens on average; {repeated}",
        context.workload,
        counted(traffic.requests as u64, "request"),
        grouped(width::round_u64(input)),
        grouped(width::round_u64(output))
    )
}

/// The question: names and values.
fn question(context: &Asked) -> Vec<(&'static str, String)> {
    let mut lines = vec![
        ("model", context.model.clone()),
        ("workload", traffic(context)),
        ("objective", objective(context)),
    ];
    lines.extend(context.assumed.iter().map(|line| ("assumed", line.clone())));
    lines
}

/// The answer in one line.
pub(super) fn claim(found: &Found) -> String {
    format!(
        "{} = {}, {}",
        found.best.name(),
        counted(found.best.gpus, "GPU"),
        found.best.setting_name()
    )
}

/// Its cost in one line.
pub(super) fn cost(context: &Asked, found: &Found) -> String {
    let best = &found.best;
    let mut text = match best.per_hour(context) {
        Some(cost) => format!(
            "{cost:.2} per hour, {} per million output tokens",
            best.per_million(context)
                .map_or_else(|| "-".to_owned(), number)
        ),
        None => "no prices given: fewest GPUs".to_owned(),
    };
    write!(text, "; attained {}", percent(best.attained)).expect("a String takes every write");
    if let Some(sure) = &found.sure {
        let of = if found.seeds > 0 {
            counted(found.seeds, "seed")
        } else {
            format!("{} parts of the run", sure.count)
        };
        write!(text, " (95 % interval {}, {of})", range(sure)).expect("a String takes every write");
    }
    if let Some((attains, fails)) = found.headroom {
        let headroom = match fails {
            None => format!("over {} %", number(100.0 * (LOAD_MAX - 1.0))),
            Some(_) => format!("{:.0} %", 100.0 * (attains - 1.0)),
        };
        write!(text, "; headroom {headroom}").expect("a String takes every write");
    }
    if let Some(error) = &found.step_error {
        write!(
            text,
            "; step times {:+.0} to {:+.0} %",
            100.0 * (error.low - 1.0),
            100.0 * (error.high - 1.0)
        )
        .expect("a String takes every write");
    }
    text
}

const HEADER: [&str; 10] = [
    "set-up",
    "settings",
    "GPUs",
    "cost/h",
    "per M output tokens",
    "J/token",
    "attained %",
    "TTFT p50, ms",
    "TTFT p99, ms",
    "TPOT p99, ms",
];

fn cells(context: &Asked, row: &Row) -> Vec<String> {
    let latency = row.answer.outcome.totals.latencies();
    let or_dash = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), number);
    vec![
        row.name(),
        row.setting_name(),
        row.gpus.to_string(),
        row.per_hour(context)
            .map_or_else(|| "-".to_owned(), |cost| format!("{cost:.2}")),
        or_dash(row.per_million(context)),
        or_dash(row.joules_per_token(context)),
        digits(row.attained),
        cell(latency.ttft_ms, P50),
        cell(latency.ttft_ms, P99),
        cell(latency.tpot_ms, P99),
    ]
}

fn knob_header(context: &Asked, found: &Found) -> Vec<String> {
    let cost = if context.priced { "cost/h" } else { "GPUs" };
    vec![
        "the answer if".to_owned(),
        "set-up".to_owned(),
        "settings".to_owned(),
        cost.to_owned(),
        format!("with {}", found.best.shape.name()),
    ]
}

/// A cost per hour, or a number of GPUs.
fn bare_cost(context: &Asked, cost: f64) -> String {
    if context.priced {
        format!("{cost:.2}")
    } else {
        number(cost)
    }
}

/// Rows of the sensitivity; marked if another shape is the cheapest, or nothing attains.
fn knob_rows(context: &Asked, found: &Found) -> Vec<(Vec<String>, bool)> {
    let row = |knob: &Sensitivity| {
        let mut cells = vec![knob.knob.clone()];
        match &knob.cheapest {
            Some(of) => cells.extend([
                space::describe(&of.shape, &of.setting, of.sized.workers),
                of.setting.name(),
                bare_cost(context, of.sized.cost),
            ]),
            None => cells.extend(["nothing attains", "-", "-"].map(str::to_owned)),
        }
        cells.push(match &knob.own {
            Some(own) => format!(
                "{} ({})",
                counted(u64::from(own.workers), "worker"),
                bare_cost(context, own.cost)
            ),
            None => "none attains".to_owned(),
        });
        (cells, !knob.cheapest.as_ref().is_some_and(|of| of.same))
    };
    found.sensitivity.iter().map(row).collect()
}

fn knob_json(context: &Asked, knob: &Sensitivity) -> Value {
    let cheapest = knob.cheapest.as_ref();
    let other = cheapest.filter(|of| !of.same);
    json!({
        "changed": knob.knob,
        "answer_workers": knob.own.map(|own| own.workers),
        "other_workers": other.map(|of| of.sized.workers),
        "choice": cheapest.map(|of| if of.same { "same" } else { "other" }),
        "answer": cheapest.map(|of| json!({
            "name": space::describe(&of.shape, &of.setting, of.sized.workers),
            "settings": of.setting.name(),
            "workers": of.sized.workers,
            "gpus": of.gpus,
            "cost_per_hour": context.priced.then_some(of.sized.cost),
            "attained": of.sized.share,
        })),
    })
}

fn effort(found: &Found) -> String {
    let proof = if found.proven {
        "; all that is cheaper, and that its bounds leave, was simulated and misses the objective"
    } else {
        ""
    };
    format!(
        "simulated {} to find it, {} in all; every combination up to its cost: {} ({}× as many){proof}",
        counted(found.search_requests, "request"),
        grouped(found.all_requests),
        grouped(found.grid_requests),
        number(found.grid_requests as f64 / found.search_requests.max(1) as f64)
    )
}

fn step_note(found: &Found) -> Option<String> {
    let error = found.step_error.as_ref()?;
    Some(format!(
        "step times: 80 % of measured deployments fall within {:+.0} to {:+.0} % of the prediction at this distance \
         from measured ones ({}; docs/accuracy.md)",
        100.0 * (error.low - 1.0),
        100.0 * (error.high - 1.0),
        match error.distance.as_str() {
            "no" => "measured",
            other => other,
        }
    ))
}

/// Attainment of each class, if there are several.
fn classes(context: &Asked, row: &Row) -> Option<String> {
    let names = &context.objectives.classes;
    if names.len() < 2 {
        return None;
    }
    let each: Vec<String> = names
        .iter()
        .zip(&row.answer.by_class)
        .map(|((name, _), &(all, met))| {
            format!("{name} {}", percent(met as f64 / all.max(1) as f64))
        })
        .collect();
    Some(format!("attained by class: {}", each.join(", ")))
}

/// Shapes that the bounds rule out, the nearest first.
fn ruled_out(ideal: &[(String, Ideal)]) -> Option<String> {
    let mut sorted: Vec<&(String, Ideal)> = ideal.iter().collect();
    sorted.sort_by(|a, b| b.1.share.total_cmp(&a.1.share));
    const SHOWN_MAX: usize = 3;
    let shown: Vec<String> = sorted
        .iter()
        .take(SHOWN_MAX)
        .map(|(name, most)| format!("{name} ({})", percent(most.share)))
        .collect();
    (!shown.is_empty()).then(|| {
        format!(
            "too slow on any number of workers, by step times alone: {}; the nearest (share of requests that can meet the \
             objectives): {}",
            counted(sorted.len() as u64, "shape"),
            shown.join(", ")
        )
    })
}

/// Each objective's share, the lowest first.
fn objectives(row: &Row) -> String {
    let mut each: Vec<(f64, &str)> = row
        .answer
        .by_objective
        .iter()
        .map(|&(name, all, met)| (met as f64 / all.max(1) as f64, name))
        .collect();
    each.sort_by(|a, b| a.0.total_cmp(&b.0));
    let each: Vec<String> = each
        .iter()
        .map(|(share, name)| format!("{name} {}", percent(*share)))
        .collect();
    each.join(", ")
}

/// Why nothing attains.
fn failure(context: &Asked, missed: &NotFound) -> String {
    let mut text = format!(
        "nothing attains {} at load {}\n",
        objective(context),
        number(missed.load)
    );
    if let Some((_, row)) = &missed.nearest {
        writeln!(
            text,
            "nearest: {} = {}, {}: {} (by objective: {})",
            row.name(),
            counted(row.gpus, "GPU"),
            row.setting_name(),
            percent(row.attained),
            objectives(row)
        )
        .expect("a String takes every write");
    }
    let mut ideal: Vec<&(String, Ideal)> = missed.ideal.iter().collect();
    ideal.sort_by(|a, b| b.1.share.total_cmp(&a.1.share));
    if let Some((name, most)) = ideal.first() {
        let each: Vec<String> = most
            .by_objective
            .iter()
            .map(|(name, share)| format!("{name} {}", percent(*share)))
            .collect();
        writeln!(
            text,
            "without any waiting, with every prefix cached, and on any number of workers, the fastest of {} that \
             cannot attain, {name}, has {} within all objectives ({}); {} of requests are too long for it; {} of them \
             can have a TTFT of {}",
            counted(missed.ideal.len() as u64, "shape"),
            percent(most.share),
            each.join(", "),
            percent(most.too_long),
            percent(context.target),
            if most.ttft_s > 1e9 {
                "no time".to_owned()
            } else {
                format!("{} s", number(most.ttft_s))
            }
        )
        .expect("a String takes every write");
    }
    text.push_str("try a larger --slo, a smaller --attain, other --gpus, or more --max-gpus\n");
    text
}

/// The excluded shapes, one per line.
pub(super) fn excluded(excluded: &[Excluded]) -> String {
    let lines: Vec<String> = excluded
        .iter()
        .map(|shape| format!("  {}: {}\n", shape.name, shape.reason))
        .collect();
    lines.concat()
}

/// The command that simulates the answer, if its load is the workload's.
fn repeat(
    written: Option<(&std::path::Path, &str)>,
    context: &Asked,
    found: &Found,
) -> Option<String> {
    let (path, workload) = written?;
    (found.load == 1.0).then(|| {
        let slo = context
            .objectives
            .all
            .as_ref()
            .map_or_else(String::new, |slo| format!(" --slo {slo}"));
        format!(
            "check it: slipstream simulate {} {workload}{slo} (digest {:016x})\n",
            path.display(),
            found.best.answer.outcome.digest
        )
    })
}

/// The cheapest with `[autoscale]` in one line; `None`: it was not searched.
fn scaled(context: &Asked, found: &Found) -> Option<String> {
    let scaled = found.scaled.as_ref()?;
    let effort = format!(
        "{}, {} left out by cost",
        counted(scaled.tried as u64, "run"),
        scaled.left_out
    );
    Some(match &scaled.best {
        None => format!("with autoscaling: nothing that was tried costs less ({effort})"),
        Some(of) => format!(
            "with autoscaling: {} to {} x ({}), {}: {} workers on average, {} instead of {}; attained {} ({effort})",
            of.workers_min,
            of.workers_max,
            of.name,
            of.setting,
            number(of.workers_mean),
            cost_of(context, of.cost),
            cost_of(context, found.best.sized.cost),
            percent(of.share)
        ),
    })
}

/// A cost per hour in words.
pub(super) fn cost_of(context: &Asked, cost: f64) -> String {
    if context.priced {
        format!("{cost:.2} per hour")
    } else {
        format!("{} GPUs", number(cost))
    }
}

/// What an interruption left out.
pub(super) fn interruption(context: &Asked, of: &Interruption) -> String {
    let mut text = String::from("interrupted");
    if let Some(stopped) = &of.stopped {
        let load = number(stopped.load);
        let so_far = match &stopped.so_far {
            None => "no configuration had attained yet".to_owned(),
            Some(row) => format!(
                "the cheapest that had attained, with one seed, is {} = {}, {}, {}",
                row.name(),
                counted(row.gpus, "GPU"),
                row.setting_name(),
                cost_of(context, row.sized.cost)
            ),
        };
        text.extend([format!(
            "; the search at load {load} had not ended: {so_far}"
        )]);
    }
    if !of.not_searched.is_empty() {
        let loads: Vec<String> = of.not_searched.iter().copied().map(number).collect();
        text.extend([format!("; not searched: load {}", loads.join(", "))]);
    }
    if of.stopped.is_none() {
        text.push_str("; runners-up, headroom and sensitivity of the last answer are not complete");
    }
    text
}

/// Everything as text, the answers first.
pub(super) fn text(
    context: &Asked,
    results: &[Result<Found, NotFound>],
    written: Option<(&std::path::Path, &str)>,
) -> String {
    let mut text = String::new();
    let several = results.len() > 1;
    for result in results {
        match result {
            Ok(found) => {
                if several {
                    write!(text, "load {}: ", number(found.load))
                        .expect("a String takes every write");
                }
                text.extend([format!("{}; {}\n", claim(found), cost(context, found))]);
            }
            Err(missed) => text.push_str(&failure(context, missed)),
        }
    }
    text.push('\n');
    for (name, value) in question(context) {
        text.extend([format!("{name:<11}{value}\n")]);
    }
    for found in results.iter().flatten() {
        text.push('\n');
        if several {
            text.extend([format!("load {}\n", number(found.load))]);
        }
        let mut table = Table::new(HEADER);
        for row in std::iter::once(&found.best).chain(&found.others) {
            table.row(cells(context, row));
        }
        text.push_str(&table.render(false));
        text.extend([format!("{}\n", effort(found))]);
        text.extend(scaled(context, found).map(|line| format!("{line}\n")));
        let notes = [
            step_note(found),
            classes(context, &found.best),
            ruled_out(&found.ideal),
        ];
        for note in notes.into_iter().flatten() {
            text.extend([format!("{note}\n")]);
        }
        text.push_str(&repeat(written, context, found).unwrap_or_default());
        if !found.sensitivity.is_empty() {
            text.push('\n');
            let mut table = Table::new(knob_header(context, found));
            for (cells, _) in knob_rows(context, found) {
                table.row(cells);
            }
            text.push_str(&table.render(false));
        }
    }
    if !context.priced {
        text.push_str("\nno prices: the cost is the number of GPUs, whatever their kind (--price, --prices)\n");
    }
    text.extend([format!("{}\n{}\n", context.searched, context.parts)]);
    if !context.excluded.is_empty() {
        text.extend([format!("not searched:\n{}", excluded(&context.excluded))]);
    }
    text
}

fn row_json(context: &Asked, row: &Row) -> Value {
    let latency = row.answer.outcome.totals.latencies();
    let throughput = row.answer.outcome.totals.throughput();
    let names = &context.objectives.classes;
    let classes: Vec<Value> = row
        .answer
        .by_class
        .iter()
        .enumerate()
        .map(|(at, &(all, met))| {
            json!({
                "name": names.get(at).map_or("all", |class| class.0.as_str()),
                "requests": all,
                "met": met,
                "share": met as f64 / all.max(1) as f64,
            })
        })
        .collect();
    let objectives: Vec<Value> = row
        .answer
        .by_objective
        .iter()
        .map(|&(name, all, met)| json!({"name": name, "requests": all, "met": met}))
        .collect();
    let mut json = json!({
        "name": row.name(),
        "gpus": row.gpus,
        "workers": row.sized.workers,
        "prefill_workers": row.shape.prefill_share.map(|share| {
            space::prefill_workers(share, &row.setting, row.sized.workers)
        }),
        "cost_per_hour": row.per_hour(context),
        "cost_per_million_output_tokens": row.per_million(context),
        "power_w_max": row.power_w(context),
        "joules_per_output_token_max": row.joules_per_token(context),
        "attained": row.attained,
        "attained_first_seed": row.answer.measured.share,
        "classes": classes,
        "objectives": objectives,
        "ttft_ms": latency.ttft_ms,
        "tpot_ms": latency.tpot_ms,
        "itl_ms": latency.itl_ms,
        "e2e_ms": latency.e2e_ms,
        "requests_per_s": throughput.requests_per_s,
        "output_tokens_per_s": throughput.output_tokens_per_s,
        "digest": format!("{:016x}", row.answer.outcome.digest),
    });
    for axis in AXES {
        if let Some(field) = axis.field {
            json[field] = match (axis.of)(&row.shape, &row.setting) {
                Some(value) => axis_value(value),
                // Its default is the checkpoint's, not the cluster file's.
                None if field == "kv_cache_dtype" => "auto".into(),
                None => Value::Null,
            };
        }
    }
    json
}

fn axis_value(value: axes::Value) -> Value {
    match value {
        axes::Value::Count(value) => value.into(),
        axes::Value::Number(value) => value.into(),
        axes::Value::Switch(value) => value.into(),
        axes::Value::Word(value) => value.into(),
    }
}

fn ideal_json(ideal: &[(String, Ideal)]) -> Vec<Value> {
    let each = |(name, most): &(String, Ideal)| {
        json!({
            "name": name,
            "attained_at_most": most.share,
            "too_long": most.too_long,
            "ttft_s": (most.ttft_s < 1e9).then_some(most.ttft_s),
        })
    };
    ideal.iter().map(each).collect()
}

fn scaled_json(context: &Asked, scaled: &Scaled) -> Value {
    let best = |of: &Bounds| {
        json!({
            "name": of.name,
            "settings": of.setting,
            "workers_min": of.workers_min,
            "workers_max": of.workers_max,
            "workers_mean": of.workers_mean,
            "cost_per_hour": context.priced.then_some(of.cost),
            "gpus_mean": (!context.priced).then_some(of.cost),
            "attained": of.share,
            "digest": format!("{:016x}", of.digest),
        })
    };
    json!({
        "runs": scaled.tried,
        "left_out": scaled.left_out,
        "best": scaled.best.as_ref().map(best),
    })
}

fn found_json(context: &Asked, found: &Found) -> Value {
    let sure = found.sure;
    json!({
        "load": found.load,
        "found": true,
        "requests": found.requests,
        "answer": row_json(context, &found.best),
        "interval": {
            "mean": sure.map_or(found.best.attained, |sure| sure.mean),
            "low": sure.map(|sure| sure.low),
            "high": sure.map(|sure| sure.high),
            "half": sure.map(|sure| (sure.high - sure.low) / 2.0),
            "seeds": (found.seeds > 0).then_some(found.seeds),
            "parts": (found.seeds == 0).then_some(sure.map_or(1, |sure| sure.count)),
        },
        "headroom": found.headroom.map(|(attains, fails)| json!({"attains": attains, "fails": fails})),
        "step_times": found.step_error.as_ref().map(|error| json!({
            "low": error.low, "high": error.high, "extrapolated": error.distance,
        })),
        "others": found.others.iter().map(|row| row_json(context, row)).collect::<Vec<_>>(),
        "sensitivity": found.sensitivity.iter().map(|knob| knob_json(context, knob)).collect::<Vec<_>>(),
        "autoscaled": found.scaled.as_ref().map(|scaled| scaled_json(context, scaled)),
        "ideal": ideal_json(&found.ideal),
        "proven": found.proven,
        "simulated_requests": found.search_requests,
        "simulated_requests_in_all": found.all_requests,
        "grid_requests": found.grid_requests,
    })
}

/// Everything as JSON.
pub(super) fn json(
    context: &Asked,
    results: &[Result<Found, NotFound>],
    interruption: Option<&str>,
) -> serde_json::Result<String> {
    let answer = |result: &Result<Found, NotFound>| match result {
        Ok(found) => found_json(context, found),
        Err(missed) => json!({
            "load": missed.load,
            "found": false,
            "requests": missed.requests,
            "proven": missed.proven,
            "nearest": missed.nearest.as_ref().map(|(_, row)| row_json(context, row)),
            "ideal": ideal_json(&missed.ideal),
        }),
    };
    let value = json!({
        "schema": 1,
        "model": context.model,
        "workload": context.workload,
        "seed": context.seed,
        "slo": context.objectives.to_string(),
        "attain": context.target,
        "headroom": context.headroom,
        "assumed": context.assumed,
        "traffic": {
            "requests": context.traffic.requests,
            "duration_s": context.traffic.duration_s,
            "requests_per_s": context.traffic.rate_per_s(),
            "input_tokens_mean": context.traffic.lengths[0],
            "output_tokens_mean": context.traffic.lengths[1],
            "repeated_prompt_share": context.traffic.repeated,
        },
        "cost": if context.priced { "price" } else { "gpus" },
        "answers": results.iter().map(answer).collect::<Vec<_>>(),
        "interrupted": interruption,
        "not_searched": context.excluded.iter().map(|shape| json!({
            "name": shape.name, "reason": shape.reason,
        })).collect::<Vec<_>>(),
    });
    Ok(serde_json::to_string_pretty(&value)? + "\n")
}

/// Tiles of an answer's page.
fn tiles(context: &Asked, found: &Found) -> Vec<Tile> {
    let best = &found.best;
    let none = || "–".to_owned();
    let sure = found.sure.as_ref();
    let sure = sure.map_or_else(String::new, |sure| format!("95 % interval {}", range(sure)));
    let cost = best.per_hour(context);
    let headroom = match found.headroom {
        None => none(),
        Some((_, None)) => format!("> {} %", number(100.0 * (LOAD_MAX - 1.0))),
        Some((attains, _)) => format!("{:.0} %", 100.0 * (attains - 1.0)),
    };
    let step_times = found.step_error.as_ref().map_or_else(none, |error| {
        format!(
            "{:+.0} to {:+.0} %",
            100.0 * (error.low - 1.0),
            100.0 * (error.high - 1.0)
        )
    });
    let joules = best.joules_per_token(context);
    vec![
        Tile::new("GPUs", best.gpus.to_string(), best.shape.name()),
        Tile::new(
            "Cost per hour",
            cost.map_or_else(none, |cost| format!("{cost:.2}")),
            cost.map_or_else(
                || "no prices given".into(),
                |cost| {
                    format!(
                        "{cost:.2} × 730 h = {} a month",
                        grouped(width::round_u64(cost * words::MONTH_H))
                    )
                },
            ),
        ),
        Tile::new(
            "Per million output tokens",
            best.per_million(context).map_or_else(none, number),
            format!("{} tokens/s", number(best.output_tokens_per_s())),
        ),
        Tile::new("Attained", percent(best.attained), sure),
        Tile::new("Headroom", headroom, "load until it stops attaining".into()),
        Tile::new(
            "Step times",
            step_times,
            "80 % of measured deployments".into(),
        ),
        Tile::new(
            "Energy per output token",
            joules.map_or_else(none, |joules| format!("≤ {} J", number(joules))),
            "at the power limits".into(),
        ),
    ]
}

/// The part of the page about an answer. `several`: there are answers to other loads.
fn page_answer(context: &Asked, found: &Found, several: bool) -> PlanAnswer {
    let best = &found.best;
    let rows = || std::iter::once(best).chain(&found.others);
    let cost = |row: &Row| {
        let ttft = row.answer.outcome.totals.latencies().ttft_ms;
        (row.name(), row.sized.cost, ttft.map(|ttft| ttft.p99))
    };
    PlanAnswer {
        heading: if several {
            format!("Load {}", number(found.load))
        } else {
            "The cheapest configuration".into()
        },
        claim: claim(found),
        lead: words::sentences(context, found),
        tiles: tiles(context, found),
        header: HEADER.to_vec(),
        rows: rows().map(|row| cells(context, row)).collect(),
        costs: rows().map(cost).collect(),
        knob_header: knob_header(context, found),
        knobs: knob_rows(context, found),
        workers: best.sized.workers,
        by_workers: found.by_workers.clone(),
        by_load: found.by_load.clone(),
        target: context.target,
        notes: context
            .assumed
            .iter()
            .map(|line| format!("assumed: {line}"))
            .chain([effort(found)])
            .chain(step_note(found))
            .chain(classes(context, best))
            .chain(ruled_out(&found.ideal))
            .chain([context.parts.clone()])
            .collect(),
    }
}

/// Everything as a page.
pub(super) fn page(
    context: &Asked,
    results: &[Result<Found, NotFound>],
    workload: &str,
    command: &str,
) -> String {
    let several = results.len() > 1;
    let found = results.iter().flatten();
    PlanPage {
        subtitle: format!(
            "{} · {} · {}",
            context.model,
            traffic(context),
            objective(context)
        ),
        cost_unit: if context.priced { "per hour" } else { "GPUs" }.into(),
        warnings: results
            .iter()
            .filter_map(|result| Some(failure(context, result.as_ref().err()?)))
            .collect(),
        answers: found
            .map(|found| page_answer(context, found, several))
            .collect(),
        texts: vec![
            ("Command".into(), command.to_owned()),
            ("Workload".into(), workload.to_owned()),
            ("Not searched".into(), excluded(&context.excluded)),
        ],
    }
    .render()
}
