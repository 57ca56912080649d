//! The engines' counters, from a server's `/metrics` page under vLLM's names.

use slipstream_report::run::EngineCounts;

/// Sums the counters over all engines; `None` if the page has none of them.
///
/// Names: vLLM V1, `vllm/v1/metrics/loggers.py`.
pub(super) fn engine_counts(page: &str) -> Option<EngineCounts> {
    let hits = sum(page, "vllm:prefix_cache_hits_total");
    let counts = EngineCounts {
        preemptions: sum(page, "vllm:num_preemptions_total"),
        prefix_query_tokens: sum(page, "vllm:prefix_cache_queries_total"),
        prefix_hit_tokens: hits,
        // Without a KV connector nothing is looked up.
        host_hit_tokens: sum(page, "vllm:external_prefix_cache_queries_total")
            .filter(|&queries| queries > 0.0)
            .and_then(|_| sum(page, "vllm:external_prefix_cache_hits_total")),
        disk_hit_tokens: None,
        peer_hit_tokens: None,
        peer_absent_tokens: None,
        peer_bytes: None,
        drafts: sum(page, "vllm:spec_decode_num_drafts_total"),
        draft_tokens: sum(page, "vllm:spec_decode_num_draft_tokens_total"),
        accepted_tokens: sum(page, "vllm:spec_decode_num_accepted_tokens_total"),
        prefix_hit_blocks: hits.zip(block_size(page)).map(|(hits, size)| hits / size),
    };
    (counts != EngineCounts::default()).then_some(counts)
}

/// Counter increase between two readings.
pub(super) fn difference(end: &EngineCounts, begin: &EngineCounts) -> EngineCounts {
    // A counter that appears with its first event started at 0.
    let minus = |end: Option<f64>, begin: Option<f64>| end.map(|e| e - begin.unwrap_or(0.0));
    EngineCounts {
        preemptions: minus(end.preemptions, begin.preemptions),
        prefix_query_tokens: minus(end.prefix_query_tokens, begin.prefix_query_tokens),
        prefix_hit_tokens: minus(end.prefix_hit_tokens, begin.prefix_hit_tokens),
        host_hit_tokens: minus(end.host_hit_tokens, begin.host_hit_tokens),
        disk_hit_tokens: None,
        peer_hit_tokens: None,
        peer_absent_tokens: None,
        peer_bytes: None,
        drafts: minus(end.drafts, begin.drafts),
        draft_tokens: minus(end.draft_tokens, begin.draft_tokens),
        accepted_tokens: minus(end.accepted_tokens, begin.accepted_tokens),
        prefix_hit_blocks: minus(end.prefix_hit_blocks, begin.prefix_hit_blocks),
    }
}

/// Tokens per block, if the server reports its configuration: a label of `vllm:cache_config_info`.
fn block_size(page: &str) -> Option<f64> {
    let line = page
        .lines()
        .find(|line| line.starts_with("vllm:cache_config_info{"))?;
    let (_, rest) = line.split_once("block_size=\"")?;
    let size: f64 = rest.split('"').next()?.parse().ok()?;
    (size > 0.0).then_some(size)
}

/// Sum over the lines `NAME{labels} VALUE` or `NAME VALUE`.
fn sum(page: &str, name: &str) -> Option<f64> {
    page.lines()
        .filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            let value = match rest.as_bytes().first()? {
                b'{' => &rest[rest.rfind('}')? + 1..],
                b' ' => rest,
                _ => return None,
            };
            value.split_ascii_whitespace().next()?.parse::<f64>().ok()
        })
        .reduce(|a, b| a + b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_summed_and_other_lines_passed_over() {
        let page = "# TYPE vllm:num_preemptions_total counter\n\
            vllm:num_preemptions_total{engine=\"0\",model_name=\"a} b\"} 3.0\n\
            vllm:num_preemptions_total{engine=\"1\"} 4 1700000000\n\
            vllm:num_preemptions_total_created 9\n\
            vllm:cache_config_info{block_size=\"16\",engine=\"0\"} 1.0\n\
            vllm:prefix_cache_hits_total 1.6e3\n\
            vllm:external_prefix_cache_queries_total 0\nvllm:external_prefix_cache_hits_total 0\n";
        let counts = engine_counts(page).unwrap();
        assert_eq!(
            (counts.preemptions, counts.prefix_hit_tokens),
            (Some(7.0), Some(1_600.0))
        );
        assert_eq!(counts.prefix_hit_blocks, Some(100.0));
        assert_eq!(counts.prefix_query_tokens, None);
        assert_eq!(counts.host_hit_tokens, None, "nothing was looked up");
        let tier = "vllm:external_prefix_cache_queries_total{engine=\"0\"} 50\n\
            vllm:external_prefix_cache_hits_total{engine=\"0\"} 48\n";
        let found = engine_counts(tier).unwrap().host_hit_tokens;
        assert_eq!(found, Some(48.0));
        assert_eq!(engine_counts("up 1\n"), None);
        let begin = EngineCounts {
            preemptions: Some(5.0),
            ..EngineCounts::default()
        };
        assert_eq!(difference(&counts, &begin).preemptions, Some(2.0));
    }
}
