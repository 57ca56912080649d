//! Load of an engine, from the text of its `/metrics`.

use std::time::Duration;

use serde::Serialize;
use slipstream_base::width::floor_u64;

use crate::http::{Client, FetchError};
use crate::prometheus::Samples;

/// Load of an engine at one moment, over all of its ranks. `None`: its metrics do not state it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct EngineLoad {
    /// Requests in execution.
    pub running: Option<u64>,
    /// Requests that wait for execution.
    pub waiting: Option<u64>,
    /// Share of KV blocks in use, 0 to 1; the maximum over ranks.
    pub kv_use: Option<f64>,
    /// Prompt tokens looked up in the prefix cache since the start.
    pub prefix_queries: Option<u64>,
    /// Prompt tokens found in the prefix cache since the start.
    pub prefix_hits: Option<u64>,
}

/// Why there is no load.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// No answer.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// Another status than 200.
    #[error("/metrics: status {0}; llama.cpp needs --metrics")]
    Status(u16),
    /// No known metric in the answer.
    #[error("/metrics: none of the known metrics of vLLM, SGLang and llama.cpp")]
    Unknown,
}

/// Names of one quantity: vLLM and Slipstream, SGLang, llama.cpp, and names of earlier versions.
const RUNNING: &[&str] = &[
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
];
const WAITING: &[&str] = &[
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "llamacpp:requests_deferred",
];
const KV_USE: &[&str] = &[
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
];
const QUERIES: &[&str] = &[
    "vllm:prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_queries_total",
];
const HITS: &[&str] = &[
    "vllm:prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hits_total",
];

/// Load in `text`; `None` if it has no known metric.
pub fn read(text: &str) -> Option<EngineLoad> {
    let found = Samples::parse(text);
    let sum = |names: &[&str]| {
        let value = names.iter().find_map(|name| found.sum(name))?;
        (value >= 0.0).then(|| floor_u64(value))
    };
    let share = KV_USE.iter().find_map(|name| {
        let shares = found.of(name).map(|sample| sample.value);
        shares.filter(|share| share.is_finite()).reduce(f64::max)
    });
    let load = EngineLoad {
        running: sum(RUNNING),
        waiting: sum(WAITING),
        kv_use: share.map(|share| share.clamp(0.0, 1.0)),
        prefix_queries: sum(QUERIES),
        prefix_hits: sum(HITS),
    };
    (load != EngineLoad::default()).then_some(load)
}

/// Asks the engine behind `client` for its load.
///
/// # Errors
/// [`LoadError`].
pub async fn load(client: &Client, deadline: Duration) -> Result<EngineLoad, LoadError> {
    let answer = client.get("/metrics", deadline).await?;
    if answer.status != 200 {
        return Err(LoadError::Status(answer.status));
    }
    read(&String::from_utf8_lossy(&answer.body)).ok_or(LoadError::Unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_engine_reports_its_load_under_its_own_names() {
        let vllm = "vllm:num_requests_running{engine=\"0\"} 3.0\n\
                    vllm:num_requests_running{engine=\"1\"} 4.0\n\
                    vllm:num_requests_waiting{engine=\"0\"} 1.0\n\
                    vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"capacity\"} 1.0\n\
                    vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\n\
                    vllm:kv_cache_usage_perc{engine=\"1\"} 0.5\n\
                    vllm:prefix_cache_queries_total{engine=\"0\"} 100\n\
                    vllm:prefix_cache_hits_total{engine=\"0\"} 64\n";
        let expected = EngineLoad {
            running: Some(7),
            waiting: Some(1),
            kv_use: Some(0.5),
            prefix_queries: Some(100),
            prefix_hits: Some(64),
        };
        assert_eq!(read(vllm), Some(expected));
        let sglang = "sglang:num_running_reqs{model_name=\"m\"} 2\nsglang:num_queue_reqs 5\n\
                      sglang:token_usage 0.28\n";
        let load = read(sglang).unwrap();
        assert_eq!(
            (load.running, load.waiting, load.kv_use),
            (Some(2), Some(5), Some(0.28))
        );
        let llama = "llamacpp:requests_processing 1\nllamacpp:requests_deferred 0\n";
        let load = read(llama).unwrap();
        assert_eq!(
            (load.running, load.waiting, load.kv_use),
            (Some(1), Some(0), None)
        );
    }

    #[test]
    fn nonsense_is_no_load() {
        assert_eq!(read("<html>not found</html>"), None);
        assert_eq!(read("python_gc_objects_collected_total 4\n"), None);
        assert_eq!(
            read("vllm:num_requests_running NaN\nvllm:num_requests_waiting -1\n"),
            None
        );
        let over = read("vllm:kv_cache_usage_perc 7\n").unwrap();
        assert_eq!(over.kv_use, Some(1.0));
    }
}
