//! The figures of `/ui.json`: series of `/metrics`, by worker or engine.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::server::series::series;

/// A cumulative histogram over all label sets of a metric, s.
#[derive(Default)]
struct Cumulative {
    /// By upper bound; its bits order as the bounds do, because none is negative.
    counts: BTreeMap<u64, f64>,
}

impl Cumulative {
    fn add(&mut self, bound: f64, count: f64) {
        *self.counts.entry(bound.to_bits()).or_default() += count;
    }

    /// `bounds` has null for the last one, infinity.
    fn json(&self) -> Value {
        let bounds: Vec<f64> = self
            .counts
            .keys()
            .map(|&bits| f64::from_bits(bits))
            .collect();
        let counts: Vec<f64> = self.counts.values().copied().collect();
        json!({ "bounds": bounds, "counts": counts }) // infinity becomes null
    }
}

/// Values of one worker or engine by field.
type Row = BTreeMap<&'static str, f64>;

/// Series of a worker, and their field.
const OF_WORKER: [(&str, &str); 9] = [
    ("slipstream_router_ready", "ready"),
    ("slipstream_router_requests", "requests"),
    ("slipstream_router_active_blocks", "active_blocks"),
    ("slipstream_router_cached_blocks", "cached_blocks"),
    ("slipstream_router_routed_total", "routed"),
    ("slipstream_rank_ready", "alive"),
    ("vllm:num_requests_running", "running"),
    ("vllm:num_requests_waiting", "waiting"),
    ("vllm:kv_cache_usage_perc", "kv_used"),
];

/// Series of a real engine, and their field. Failures of several causes are added up.
const OF_ENGINE: [(&str, &str); 7] = [
    ("slipstream_engine_up", "ready"),
    ("slipstream_engine_in_flight", "in_flight"),
    ("slipstream_engine_requests_total", "requests"),
    ("slipstream_engine_failures_total", "failures"),
    ("slipstream_engine_retries_total", "retries"),
    ("slipstream_engine_kv_blocks", "cached_blocks"),
    ("slipstream_engine_kv_guessed", "kv_guessed"),
];

/// Series of the twin of a real engine, and their quantity. The label `side` says which of the two it is.
const OF_TWIN: [(&str, &str); 4] = [
    ("slipstream_shadow_ttft_mean_seconds", "ttft"),
    ("slipstream_shadow_itl_mean_seconds", "itl"),
    ("slipstream_shadow_e2e_mean_seconds", "e2e"),
    ("slipstream_shadow_hit_ratio", "hits"),
];

/// Sums over all label sets.
const TOTALS: [(&str, &str); 3] = [
    ("vllm:prompt_tokens_total", "prompt_tokens"),
    ("vllm:generation_tokens_total", "generation_tokens"),
    ("slipstream_cached_tokens_total", "cached_tokens"),
];

/// Prompt tokens of requests that ended, by source.
const COMPUTED: &str = "vllm:prompt_tokens_by_source_total";

/// Series that count errors: the label that names the kind, if there is one, and the kind's beginning.
const ERRORS: [(&str, Option<&str>, &str); 8] = [
    (
        "slipstream_requests_rejected_total",
        Some("reason"),
        "rejected",
    ),
    ("slipstream_streams_cut_total", Some("reason"), "cut"),
    ("slipstream_streams_lost_total", None, "worker lost"),
    (
        "slipstream_engine_refusals_total",
        None,
        "refused by an engine",
    ),
    ("slipstream_engine_failures_total", Some("cause"), "engine"),
    (
        "slipstream_engine_answers_broken_total",
        None,
        "answer broken off",
    ),
    ("slipstream_key_limited_total", Some("rate"), "rate limit"),
    ("slipstream_faults_injected_total", Some("fault"), "fault"),
];

/// Ends of prefills that are failures.
const PREFILL_FAILURES: [&str; 2] = ["failed", "decode_failed"];

/// The figures in an OpenMetrics text.
pub(super) fn snapshot(text: &str) -> Value {
    let mut workers: BTreeMap<(u64, String), Row> = BTreeMap::new();
    let mut engines: Vec<(String, Row)> = Vec::new();
    let fields = TOTALS.iter().map(|&(_, field)| field);
    let fields = fields.chain(["computed_tokens"]);
    let mut totals: BTreeMap<&str, f64> = fields.map(|field| (field, 0.0)).collect();
    let mut errors: BTreeMap<String, f64> = BTreeMap::new();
    let mut twins: BTreeMap<String, Value> = BTreeMap::new();
    let [mut ttft, mut first_byte, mut itl] = [(); 3].map(|()| Cumulative::default());
    let (mut completed, mut queued) = (0.0, 0.0);

    for line in text.lines() {
        let Some((name, labels, value)) = series(line) else {
            continue;
        };
        let label = |key: &str| {
            let found = labels.iter().find(|(name, _)| *name == key);
            found.map(|(_, value)| value.as_str())
        };
        if let Some((_, field)) = OF_WORKER.iter().find(|(series, _)| *series == name) {
            let rank = (
                label("worker").unwrap_or("?"),
                label("engine").unwrap_or("0"),
            );
            let number = rank.0.trim_start_matches('w').parse().unwrap_or(u64::MAX);
            let shown = match rank.1 {
                "0" => rank.0.to_owned(),
                other => format!("{}.{other}", rank.0),
            };
            workers
                .entry((number, shown))
                .or_default()
                .insert(field, value);
        }
        if let Some((_, field)) = OF_ENGINE.iter().find(|(series, _)| *series == name) {
            let engine = label("engine").unwrap_or("?");
            let at = engines.iter().position(|(name, _)| name == engine);
            let at = at.unwrap_or_else(|| {
                engines.push((engine.to_owned(), Row::new()));
                engines.len() - 1
            });
            *engines[at].1.entry(field).or_default() += value;
        }
        if let Some(engine) = label("engine") {
            if let Some((_, quantity)) = OF_TWIN.iter().find(|(series, _)| *series == name)
                && let Some(side) = label("side")
            {
                twins.entry(engine.to_owned()).or_default()[*quantity][side] = value.into();
            }
            if name == "slipstream_shadow_parted"
                && let Some(of) = label("of")
            {
                let parted = &mut twins.entry(engine.to_owned()).or_default()["parted"];
                parted[of] = (value > 0.0).into();
            }
        }
        if name == "slipstream_engine_prefills_total"
            && let Some((engine, outcome)) = label("engine").zip(label("outcome"))
            && let Some((_, row)) = engines.iter_mut().find(|(known, _)| known == engine)
        {
            let failed = PREFILL_FAILURES.contains(&outcome);
            *row.entry("prefills").or_default() += value;
            *row.entry("prefill_failures").or_default() += if failed { value } else { 0.0 };
            if failed {
                *errors.entry(format!("prefill: {outcome}")).or_default() += value;
            }
        }
        if let Some((_, field)) = TOTALS.iter().find(|(series, _)| *series == name) {
            *totals.entry(field).or_default() += value;
        }
        if name == COMPUTED && label("source") == Some("local_compute") {
            *totals.entry("computed_tokens").or_default() += value;
        }
        if let Some((_, key, kind)) = ERRORS.iter().find(|(series, ..)| *series == name) {
            let kind = match key.and_then(label) {
                None => (*kind).to_owned(),
                Some(reason) => format!("{kind}: {reason}"),
            };
            *errors.entry(kind).or_default() += value;
        }
        let histogram = match name {
            "vllm:time_to_first_token_seconds_bucket" => Some(&mut ttft),
            "vllm:inter_token_latency_seconds_bucket" => Some(&mut itl),
            "slipstream_engine_first_byte_seconds_bucket" => Some(&mut first_byte),
            _ => None,
        };
        if let Some((histogram, bound)) = histogram.zip(label("le").and_then(bound)) {
            histogram.add(bound, value);
        }
        match name {
            "vllm:e2e_request_latency_seconds_count" => completed += value,
            "slipstream_requests_queued" => queued += value,
            _ => {}
        }
    }

    let is_router = !engines.is_empty();
    let sum = |field: &str| -> f64 { workers.values().filter_map(|row| row.get(field)).sum() };
    let of_engines =
        |field: &str| -> f64 { engines.iter().filter_map(|(_, row)| row.get(field)).sum() };
    // Finished requests of modelled engines; requests that were sent to real ones.
    let (requests, running) = if is_router {
        (of_engines("requests"), of_engines("in_flight"))
    } else {
        (completed, sum("running"))
    };
    let mut totals: serde_json::Map<String, Value> = totals
        .into_iter()
        .map(|(field, value)| (field.to_owned(), value.into()))
        .collect();
    totals.insert("requests".into(), requests.into());
    totals.insert("running".into(), running.into());
    totals.insert("waiting".into(), (sum("waiting") + queued).into());
    totals.insert("errors".into(), errors.values().sum::<f64>().into());

    let field = |row: &Row, name: &str| row.get(name).copied();
    let is_up = |row: &Row, name: &str| field(row, name).is_none_or(|value| value > 0.0);
    // The router's rows of real engines repeat the engines.
    let workers: Vec<Value> = workers
        .iter()
        .filter(|_| !is_router)
        .map(|((_, name), row)| {
            json!({
                "name": name,
                "ready": is_up(row, "ready") && is_up(row, "alive"),
                "running": field(row, "running").or(field(row, "requests")),
                "waiting": field(row, "waiting"),
                "kv_used": field(row, "kv_used"),
                "active_blocks": field(row, "active_blocks"),
                "cached_blocks": field(row, "cached_blocks"),
                "routed": field(row, "routed"),
            })
        })
        .collect();
    let engines: Vec<Value> = engines
        .iter()
        .map(|(name, row)| {
            json!({
                "name": name,
                "ready": field(row, "ready").is_some_and(|value| value > 0.0),
                "in_flight": field(row, "in_flight"),
                "requests": field(row, "requests"),
                "failures": field(row, "failures"),
                "retries": field(row, "retries"),
                "cached_blocks": field(row, "cached_blocks"),
                "kv_guessed": field(row, "kv_guessed").is_some_and(|value| value > 0.0),
                "prefills": field(row, "prefills"),
                "prefill_failures": field(row, "prefill_failures"),
                "twin": twins.get(name),
            })
        })
        .collect();
    let ttft = if is_router { first_byte } else { ttft };
    json!({
        "schema": 1,
        "version": env!("CARGO_PKG_VERSION"),
        "totals": totals,
        "ttft": ttft.json(),
        "itl": itl.json(),
        "errors": errors,
        "workers": workers,
        "engines": engines,
    })
}

fn bound(text: &str) -> Option<f64> {
    match text {
        "+Inf" => Some(f64::INFINITY),
        text => text.parse().ok().filter(|bound| *bound >= 0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_rows_in_their_order() {
        let text = "\
            slipstream_router_ready{worker=\"w10\",engine=\"0\"} 1.0\n\
            slipstream_router_ready{worker=\"w2\",engine=\"1\"} 0.0\n\
            vllm:num_requests_running{model_name=\"m\",worker=\"w10\",engine=\"0\"} 3.0\n\
            vllm:num_requests_waiting{model_name=\"m\",worker=\"w10\",engine=\"0\"} 4.0\n\
            vllm:kv_cache_usage_perc{model_name=\"m\",worker=\"w10\",engine=\"0\"} 0.25\n\
            slipstream_requests_queued 5\n\
            vllm:prompt_tokens_total 70\n\
            vllm:prompt_tokens_by_source_total{source=\"local_compute\"} 40\n\
            vllm:prompt_tokens_by_source_total{source=\"local_cache_hit\"} 20\n\
            slipstream_requests_rejected_total{reason=\"busy\"} 6\n\
            slipstream_streams_lost_total 1\n";
        let json = snapshot(text);
        assert_eq!(json["workers"][0]["name"], "w2.1");
        assert_eq!(json["workers"][0]["ready"], false);
        assert_eq!(
            json["workers"][0]["kv_used"],
            Value::Null,
            "not reported is not 0"
        );
        assert_eq!(json["workers"][1]["name"], "w10");
        assert_eq!(json["workers"][1]["kv_used"], 0.25);
        assert_eq!(
            json["totals"]["waiting"], 9.0,
            "at workers and in the router's queue"
        );
        assert_eq!(json["totals"]["prompt_tokens"], 70.0);
        assert_eq!(json["totals"]["computed_tokens"], 40.0);
        assert_eq!(json["errors"]["rejected: busy"], 6.0);
        assert_eq!(json["totals"]["errors"], 7.0);
    }

    #[test]
    fn engines_replace_workers_and_add_their_histograms() {
        let text = "\
            slipstream_router_ready{worker=\"w0\",engine=\"0\"} 1.0\n\
            slipstream_engine_up{engine=\"http://a:1\"} 1.0\n\
            slipstream_engine_up{engine=\"http://b:1\"} 0.0\n\
            slipstream_engine_failures_total{engine=\"http://b:1\",cause=\"connect\"} 2\n\
            slipstream_engine_failures_total{engine=\"http://b:1\",cause=\"lost\"} 1\n\
            slipstream_shadow_ttft_mean_seconds{engine=\"http://a:1\",side=\"measured\"} 0.5\n\
            slipstream_shadow_ttft_mean_seconds{engine=\"http://a:1\",side=\"predicted\"} 0.25\n\
            slipstream_shadow_parted{engine=\"http://a:1\",of=\"ttft\"} 1\n\
            slipstream_engine_prefills_total{engine=\"http://a:1\",outcome=\"transferred\"} 7\n\
            slipstream_engine_prefills_total{engine=\"http://a:1\",outcome=\"decode_failed\"} 2\n\
            slipstream_key_limited_total{key=\"k\",rate=\"tokens\"} 5\n\
            slipstream_faults_injected_total{fault=\"429\"} 4\n\
            slipstream_engine_first_byte_seconds_bucket{le=\"+Inf\",engine=\"http://a:1\"} 9\n\
            slipstream_engine_first_byte_seconds_bucket{le=\"0.5\",engine=\"http://a:1\"} 4\n\
            slipstream_engine_first_byte_seconds_bucket{le=\"0.5\",engine=\"http://b:1\"} 3\n";
        let json = snapshot(text);
        assert_eq!(json["workers"], json!([]));
        assert_eq!(json["engines"][1]["failures"], 3.0);
        assert_eq!(json["engines"][1]["ready"], false);
        assert_eq!(json["engines"][0]["cached_blocks"], Value::Null);
        let twin = &json["engines"][0]["twin"];
        assert_eq!(twin["ttft"], json!({ "measured": 0.5, "predicted": 0.25 }));
        assert_eq!(twin["parted"], json!({ "ttft": true }));
        assert_eq!(json["engines"][1]["twin"], Value::Null);
        assert_eq!(json["engines"][0]["prefills"], 9.0);
        assert_eq!(json["engines"][0]["prefill_failures"], 2.0);
        assert_eq!(json["engines"][1]["prefills"], Value::Null);
        assert_eq!(json["errors"]["prefill: decode_failed"], 2.0);
        assert_eq!(json["errors"]["rate limit: tokens"], 5.0);
        assert_eq!(json["errors"]["fault: 429"], 4.0);
        assert_eq!(
            json["ttft"],
            json!({ "bounds": [0.5, null], "counts": [7.0, 9.0] })
        );
    }
}
