//! A run's report as text: a line per figure that was measured, and tables of latencies.

use std::fmt::Write as _;

use slipstream_base::text::{brief, foreign, several};
use slipstream_base::width;

use super::{ClassReport, ErrorCount, Goodput, ModelReport, RunReport, SharingPool};
use crate::latency::{P50, P75, P90, P95, P99, SIGNIFICANT_DIGITS, TOO_FEW, cell};
use crate::table::{Table, counted, grouped, number};

impl RunReport {
    /// The report as text.
    pub fn render(&self) -> String {
        let model = brief(&self.model, 200);
        let mut lines = vec![format!("{} · {model} · {}", self.target, self.workload)];
        lines.extend(self.request_lines());
        lines.extend(self.token_lines());
        lines.extend(self.engine_lines());
        lines.extend(self.objective_lines());
        lines.extend(self.continuation_lines());
        lines.extend(self.pool_lines());
        lines.extend(self.cost_lines());
        let mut out = String::new();
        for line in lines {
            // Servers name their models and write their errors.
            out.push_str(&foreign(&line));
            out.push('\n');
        }
        out.push('\n');
        out.push_str(&self.latency_table());
        out.push_str(&self.class_tables());
        writeln!(
            out,
            "from due to received; percentiles to {SIGNIFICANT_DIGITS} digits; tokens that arrive in one read share its time"
        )
        .expect("a String takes every write");
        if self.leaves_out_percentiles() {
            out.push_str(TOO_FEW);
            out.push('\n');
        }
        out
    }

    fn request_lines(&self) -> Vec<String> {
        let r = &self.requests;
        let mut counts = format!(
            "{} of {} answered in {} s",
            grouped(r.succeeded),
            counted(r.sent, "request"),
            number(self.duration_s)
        );
        for (count, one, what) in [
            (r.failed, "", "failed"),
            (r.unfinished, "", "in flight when the run was cut short"),
            (r.abandoned, "later turn", " abandoned"),
            (r.retries, "", "retried"),
            (r.skipped_lines, "trace line", " skipped"),
            (r.warmup, "", "before them as warm-up"),
        ] {
            if count > 0 {
                let word = if one.is_empty() {
                    String::new()
                } else {
                    several(count, one)
                };
                write!(counts, ", {} {word}{what}", grouped(count))
                    .expect("a String takes every write");
            }
        }
        let errors = self.errors.iter().map(|(kind, error)| {
            let ErrorCount { count, example } = error;
            format!(
                "  failed: {} {kind}, for example: {example}",
                grouped(*count)
            )
        });
        std::iter::once(counts).chain(errors).collect()
    }

    fn token_lines(&self) -> Vec<String> {
        let throughput = format!(
            "throughput {} requests/s, {} input tokens/s, {} output tokens/s",
            number(self.throughput.requests_per_s),
            number(self.throughput.input_tokens_per_s),
            number(self.throughput.output_tokens_per_s),
        );
        let mut tokens = format!(
            "tokens     {} in, {} out in {}",
            grouped(self.tokens.input),
            grouped(self.tokens.output),
            counted(self.tokens.events, "event")
        );
        if let Some(share) = self.prefix_hit_share() {
            write!(tokens, ", prefix hits {} %", number(share * 100.0))
                .expect("a String takes every write");
        }
        let engine = self.engine.unwrap_or_default();
        if let Some(blocks) = engine.prefix_hit_blocks {
            write!(tokens, " ({})", counted(width::round_u64(blocks), "block"))
                .expect("a String takes every write");
        }
        for (found, tier) in [
            (engine.host_hit_tokens, "host memory"),
            (engine.disk_hit_tokens, "disk"),
            (engine.peer_hit_tokens, "other workers"),
        ] {
            if let Some(found) = found {
                let share = found / (self.tokens.input as f64).max(1.0);
                write!(tokens, ", {} % from {tier}", number(share * 100.0))
                    .expect("a String takes every write");
            }
        }
        vec![throughput, tokens]
    }

    fn engine_lines(&self) -> Vec<String> {
        let engine = self.engine.unwrap_or_default();
        let mut lines = Vec::new();
        if let Some(preemptions) = engine.preemptions {
            let preemptions = counted(width::round_u64(preemptions), "preemption");
            lines.push(format!("engines    {preemptions}"));
        }
        if let (Some(drafts), Some(tokens), Some(accepted)) =
            (engine.drafts, engine.draft_tokens, engine.accepted_tokens)
            && drafts > 0.0
        {
            lines.push(format!(
                "drafts     {} % of {} drafted tokens accepted; {} tokens per step and sequence",
                number(100.0 * accepted / tokens.max(1.0)),
                grouped(width::round_u64(tokens)),
                number(1.0 + accepted / drafts),
            ));
        }
        lines
    }

    fn objective_lines(&self) -> Vec<String> {
        let overload = self.overloaded.as_ref().map(|overload| {
            format!(
                "overloaded {}; latencies are those of a queue that grows until requests stop",
                overload.line()
            )
        });
        let goodput = self.goodput.as_ref().map(|goodput| {
            format!(
                "goodput    {} requests/s ({} %) within {}",
                number(goodput.requests_per_s),
                number(goodput.share * 100.0),
                goodput.slo
            )
        });
        overload.into_iter().chain(goodput).collect()
    }

    /// Prompts and answers that a second worker continued.
    fn continuation_lines(&self) -> Vec<String> {
        let transfers = self.transfers.as_ref().map(|t| {
            format!(
                "transfers  {}, {} GB, {} ms at p50, {} at p99",
                counted(t.count, "prompt"),
                number(t.bytes as f64 / 1e9),
                cell(t.ms, P50),
                cell(t.ms, P99)
            )
        });
        let resumed = self.resumed.as_ref().map(|r| {
            format!(
                "resumed    {}, {} computed again, pause {} ms at p50, {} at p99",
                counted(r.count, "answer"),
                counted(r.tokens, "token"),
                cell(r.ms, P50),
                cell(r.ms, P99)
            )
        });
        transfers.into_iter().chain(resumed).collect()
    }

    /// Pools that scale, and pools that share GPUs.
    fn pool_lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(autoscale) = &self.autoscale {
            for pool in &autoscale.pools {
                let changes = autoscale.changes.iter().filter(|c| c.pool == pool.name);
                lines.push(format!(
                    "autoscale  {}: {} to {} workers, {} on average; {}",
                    pool.name,
                    pool.workers_min,
                    pool.workers_max,
                    number(pool.workers_mean),
                    counted(changes.count() as u64, "change")
                ));
            }
        }
        for share in &self.shares {
            let pool = |pool: &SharingPool| {
                format!("{} awake {} %", pool.name, number(100.0 * pool.awake_share))
            };
            let pools: Vec<String> = share.pools.iter().map(pool).collect();
            lines.push(format!(
                "share      {}: {}, {} s swapping ({} %); {}",
                share.name,
                counted(share.swaps, "swap"),
                number(share.swapping_s),
                number(100.0 * share.swapping_share),
                pools.join(", ")
            ));
        }
        lines
    }

    /// Cost of the cluster, expected error, and cost of the processes.
    fn cost_lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(gpu) = &self.gpu {
            let gpus = counted(gpu.gpus, "GPU");
            lines.push(format!("GPU-hours  {} on {gpus}", number(gpu.hours)));
        }
        for error in self.simulation.iter().flat_map(|s| &s.expected_error) {
            lines.push(format!("expected   {}", error.line()));
        }
        // A simulated cluster has no load generator.
        let client = match self.target.as_str() {
            "simulated" => "simulator",
            _ => "client",
        };
        for (who, cost) in [(client, &self.client), ("server", &self.server)] {
            if let Some(cost) = cost {
                let rss = cost.rss_peak_bytes.map_or(String::new(), |b| {
                    format!(", peak RSS {} MiB", number(b as f64 / f64::from(1 << 20)))
                });
                lines.push(format!(
                    "{who:<10} {} CPU-s, {} µs per request, {} µs per output token{rss}",
                    number(cost.cpu_s),
                    number(cost.cpu_us_per_request),
                    number(cost.cpu_us_per_token)
                ));
            }
        }
        lines
    }

    fn latency_table(&self) -> String {
        let mut table = Table::new(["ms", "mean", "p50", "p75", "p90", "p95", "p99", "max"]);
        let l = &self.latency;
        for (name, percentiles) in [
            ("TTFT", l.ttft_ms),
            ("ITL", l.itl_ms),
            ("TPOT", l.tpot_ms),
            ("E2E", l.e2e_ms),
            ("send lag", l.send_lag_ms),
        ] {
            if let Some(p) = percentiles {
                let tails = [P50, P75, P90, P95, P99].map(|q| cell(percentiles, q));
                let cells = [name.to_owned(), number(p.mean)].into_iter().chain(tails);
                table.row(cells.chain([number(p.max)]));
            }
        }
        table.render(false)
    }

    /// A table of the classes and one of the models, each behind an empty line.
    fn class_tables(&self) -> String {
        let mut out = String::new();
        if !self.classes.is_empty() {
            out.push('\n');
            out.push_str(&render_classes(
                "class",
                self.classes.iter().map(|c| (c, None)),
            ));
        }
        if !self.models.is_empty() {
            let hits = |m: &ModelReport| match m.prefix_hit_share {
                Some(share) => number(100.0 * share),
                None => "-".to_owned(),
            };
            let rows = self.models.iter().map(|m| (&m.requests, Some(hits(m))));
            out.push('\n');
            out.push_str(&render_classes("model", rows));
        }
        out
    }

    /// Whether there are too few samples for some percentile of the tables.
    fn leaves_out_percentiles(&self) -> bool {
        let l = &self.latency;
        let shown = [l.ttft_ms, l.itl_ms, l.tpot_ms, l.e2e_ms, l.send_lag_ms];
        let of_classes = (self.classes.iter())
            .chain(self.models.iter().map(|m| &m.requests))
            .flat_map(|c| [c.ttft_ms, c.itl_ms, c.tpot_ms, c.e2e_ms]);
        shown
            .into_iter()
            .chain(of_classes)
            .flatten()
            .any(|p| p.leaves_out())
    }
}

/// A table of `rows`, each with its prefix hits if those are known; `what` they are.
fn render_classes<'r>(
    what: &str,
    rows: impl Iterator<Item = (&'r ClassReport, Option<String>)>,
) -> String {
    let mut rows = rows.peekable();
    let hits = rows.peek().is_some_and(|(_, hits)| hits.is_some());
    let mut heads = vec![
        what,
        "requests",
        "failed",
        "goodput/s",
        "within %",
        "TTFT p50",
        "p99",
        "ITL p50",
        "p99",
        "TPOT p50",
        "p99",
        "E2E p50",
        "p99",
    ];
    if hits {
        heads.push("hits %");
    }
    let mut table = Table::new(heads);
    for (class, hits) in rows {
        let goodput = |get: fn(&Goodput) -> f64| {
            let goodput = class.goodput.as_ref();
            goodput.map_or_else(|| "-".to_owned(), |g| number(get(g)))
        };
        let cells = [
            class.name.clone(),
            grouped(class.sent),
            grouped(class.failed),
            goodput(|g| g.requests_per_s),
            goodput(|g| g.share * 100.0),
            cell(class.ttft_ms, P50),
            cell(class.ttft_ms, P99),
            cell(class.itl_ms, P50),
            cell(class.itl_ms, P99),
            cell(class.tpot_ms, P50),
            cell(class.tpot_ms, P99),
            cell(class.e2e_ms, P50),
            cell(class.e2e_ms, P99),
        ];
        table.row(cells.into_iter().chain(hits));
    }
    table.render(false)
}
