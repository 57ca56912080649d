//! The figures of `/ui.json`: series of `/metrics`, by worker or engine.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::server::series::{Series, series};

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
const OF_ENGINE: [(&str, &str); 9] = [
    ("slipstream_engine_up", "ready"),
    ("slipstream_engine_in_flight", "in_flight"),
    ("slipstream_engine_requests_total", "requests"),
    ("slipstream_engine_prompt_blocks_total", "prompt_blocks"),
    ("slipstream_engine_prefix_hit_blocks_total", "hit_blocks"),
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
const TOTALS: [(&str, &str); 5] = [
    ("vllm:prompt_tokens_total", "prompt_tokens"),
    ("vllm:generation_tokens_total", "generation_tokens"),
    ("slipstream_cached_tokens_total", "cached_tokens"),
    ("vllm:e2e_request_latency_seconds_count", "completed"),
    ("slipstream_requests_queued", "queued"),
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
    let mut figures = Figures::default();
    for series in text.lines().filter_map(series) {
        figures.add_worker(&series);
        figures.add_engine(&series);
        figures.add_prefills(&series);
        figures.add_twin(&series);
        figures.add_total(&series);
        figures.add_error(&series);
        figures.add_latency(&series);
    }
    figures.json()
}

/// Sums of series, by what they are about.
#[derive(Default)]
struct Figures {
    /// By number and name.
    workers: BTreeMap<(u64, String), Row>,
    /// In the order of the text.
    engines: Vec<(String, Row)>,
    /// By engine.
    twins: BTreeMap<String, Value>,
    totals: BTreeMap<&'static str, f64>,
    errors: BTreeMap<String, f64>,
    ttft: Cumulative,
    first_byte: Cumulative,
    itl: Cumulative,
}

impl Figures {
    fn add_worker(&mut self, series: &Series<'_>) {
        let Some(field) = field_of(&OF_WORKER, series.name) else {
            return;
        };
        let worker = series.label("worker").unwrap_or("?");
        let number = worker.trim_start_matches('w').parse().unwrap_or(u64::MAX);
        let shown = match series.label("engine").unwrap_or("0") {
            "0" => worker.to_owned(),
            rank => format!("{worker}.{rank}"),
        };
        let row = self.workers.entry((number, shown)).or_default();
        row.insert(field, series.value);
    }

    fn add_engine(&mut self, series: &Series<'_>) {
        let Some(field) = field_of(&OF_ENGINE, series.name) else {
            return;
        };
        let engine = series.label("engine").unwrap_or("?");
        let known = self.engines.iter().position(|(name, _)| name == engine);
        let at = known.unwrap_or_else(|| {
            self.engines.push((engine.to_owned(), Row::new()));
            self.engines.len() - 1
        });
        *self.engines[at].1.entry(field).or_default() += series.value;
    }

    /// Prompts that an engine computed for others.
    fn add_prefills(&mut self, series: &Series<'_>) {
        if series.name != "slipstream_engine_prefills_total" {
            return;
        }
        let labels = series.label("engine").zip(series.label("outcome"));
        let Some((engine, outcome)) = labels else {
            return;
        };
        let Some((_, row)) = self.engines.iter_mut().find(|(known, _)| known == engine) else {
            return;
        };
        let failed = PREFILL_FAILURES.contains(&outcome);
        *row.entry("prefills").or_default() += series.value;
        *row.entry("prefill_failures").or_default() += if failed { series.value } else { 0.0 };
        if failed {
            *self
                .errors
                .entry(format!("prefill: {outcome}"))
                .or_default() += series.value;
        }
    }

    fn add_twin(&mut self, series: &Series<'_>) {
        let Some(engine) = series.label("engine") else {
            return;
        };
        if let Some((quantity, side)) = field_of(&OF_TWIN, series.name).zip(series.label("side")) {
            let twin = self.twins.entry(engine.to_owned()).or_default();
            twin[quantity][side] = series.value.into();
        }
        if series.name == "slipstream_shadow_parted"
            && let Some(of) = series.label("of")
        {
            let twin = self.twins.entry(engine.to_owned()).or_default();
            twin["parted"][of] = (series.value > 0.0).into();
        }
    }

    fn add_total(&mut self, series: &Series<'_>) {
        let field = match series.name {
            COMPUTED if series.label("source") == Some("local_compute") => Some("computed_tokens"),
            name => field_of(&TOTALS, name),
        };
        if let Some(field) = field {
            *self.totals.entry(field).or_default() += series.value;
        }
    }

    fn add_error(&mut self, series: &Series<'_>) {
        let Some((_, key, kind)) = ERRORS.iter().find(|(name, ..)| *name == series.name) else {
            return;
        };
        let kind = match key.and_then(|key| series.label(key)) {
            None => (*kind).to_owned(),
            Some(reason) => format!("{kind}: {reason}"),
        };
        *self.errors.entry(kind).or_default() += series.value;
    }

    fn add_latency(&mut self, series: &Series<'_>) {
        let histogram = match series.name {
            "vllm:time_to_first_token_seconds_bucket" => &mut self.ttft,
            "vllm:inter_token_latency_seconds_bucket" => &mut self.itl,
            "slipstream_engine_first_byte_seconds_bucket" => &mut self.first_byte,
            _ => return,
        };
        if let Some(bound) = series.label("le").and_then(bound) {
            histogram.add(bound, series.value);
        }
    }

    /// Whether the server routes to real engines.
    fn is_router(&self) -> bool {
        !self.engines.is_empty()
    }

    fn json(&self) -> Value {
        let is_router = self.is_router();
        let ttft = if is_router {
            &self.first_byte
        } else {
            &self.ttft
        };
        json!({
            "schema": 1,
            "version": env!("CARGO_PKG_VERSION"),
            "totals": self.sums(),
            "ttft": ttft.json(),
            "itl": self.itl.json(),
            "errors": self.errors,
            // The router's rows of real engines repeat the engines.
            "workers": if is_router { Vec::new() } else { self.worker_rows() },
            "engines": self.engine_rows(),
        })
    }

    fn sums(&self) -> Value {
        let total = |field: &str| self.totals.get(field).copied().unwrap_or(0.0);
        let workers = |field: &str| -> f64 {
            let values = self.workers.values().filter_map(|row| row.get(field));
            values.sum()
        };
        let engines = |field: &str| -> f64 {
            let values = self.engines.iter().filter_map(|(_, row)| row.get(field));
            values.sum()
        };
        // Finished requests of modelled engines; requests that were sent to real ones.
        let (requests, running) = if self.is_router() {
            (engines("requests"), engines("in_flight"))
        } else {
            (total("completed"), workers("running"))
        };
        // Modelled engines count their hits themselves, in tokens.
        let of_router = |field: &str| self.is_router().then(|| engines(field));
        json!({
            "prompt_tokens": total("prompt_tokens"),
            "generation_tokens": total("generation_tokens"),
            "cached_tokens": total("cached_tokens"),
            "computed_tokens": total("computed_tokens"),
            "prompt_blocks": of_router("prompt_blocks"),
            "hit_blocks": of_router("hit_blocks"),
            "requests": requests,
            "running": running,
            "waiting": workers("waiting") + total("queued"),
            "errors": self.errors.values().sum::<f64>(),
        })
    }

    fn worker_rows(&self) -> Vec<Value> {
        let is_up = |row: &Row, name: &str| row.get(name).is_none_or(|&value| value > 0.0);
        let row = |((_, name), row): (&(u64, String), &Row)| {
            let field = |name: &str| row.get(name).copied();
            json!({
                "name": name,
                "ready": is_up(row, "ready") && is_up(row, "alive"),
                "running": field("running").or(field("requests")),
                "waiting": field("waiting"),
                "kv_used": field("kv_used"),
                "active_blocks": field("active_blocks"),
                "cached_blocks": field("cached_blocks"),
                "routed": field("routed"),
            })
        };
        self.workers.iter().map(row).collect()
    }

    fn engine_rows(&self) -> Vec<Value> {
        let row = |(name, row): &(String, Row)| {
            let field = |name: &str| row.get(name).copied();
            json!({
                "name": name,
                "ready": field("ready").is_some_and(|value| value > 0.0),
                "in_flight": field("in_flight"),
                "requests": field("requests"),
                "failures": field("failures"),
                "retries": field("retries"),
                "prompt_blocks": field("prompt_blocks"),
                "hit_blocks": field("hit_blocks"),
                "cached_blocks": field("cached_blocks"),
                "kv_guessed": field("kv_guessed").is_some_and(|value| value > 0.0),
                "prefills": field("prefills"),
                "prefill_failures": field("prefill_failures"),
                "twin": self.twins.get(name),
            })
        };
        self.engines.iter().map(row).collect()
    }
}

/// The field of the series `name`.
fn field_of(table: &[(&str, &'static str)], name: &str) -> Option<&'static str> {
    let (_, field) = table.iter().find(|(series, _)| *series == name)?;
    Some(field)
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
        assert_eq!(
            json["totals"]["hit_blocks"],
            Value::Null,
            "counted in tokens"
        );
    }

    #[test]
    fn engines_replace_workers_and_add_their_histograms() {
        let text = "\
            slipstream_router_ready{worker=\"w0\",engine=\"0\"} 1.0\n\
            slipstream_engine_up{engine=\"http://a:1\"} 1.0\n\
            slipstream_engine_up{engine=\"http://b:1\"} 0.0\n\
            slipstream_engine_prompt_blocks_total{engine=\"http://a:1\"} 20\n\
            slipstream_engine_prefix_hit_blocks_total{engine=\"http://a:1\"} 12\n\
            slipstream_engine_prompt_blocks_total{engine=\"http://b:1\"} 10\n\
            slipstream_engine_prefix_hit_blocks_total{engine=\"http://b:1\"} 3\n\
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
        assert_eq!(json["engines"][0]["hit_blocks"], 12.0);
        assert_eq!(json["totals"]["prompt_blocks"], 30.0);
        assert_eq!(json["totals"]["hit_blocks"], 15.0);
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
