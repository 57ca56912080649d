//! A trace of the tasks on each CPU, in the JSON format of Perfetto and Chrome.

use std::fmt::Write as _;

/// Runs of tasks on CPUs, one track per CPU. Bounded: runs beyond the limit are counted.
#[derive(Debug)]
pub struct Trace {
    json: String,
    began: Vec<Option<(u32, u64)>>,
    left: usize,
    dropped: u64,
}

impl Trace {
    /// A trace of `cpus` CPUs with at most `max` runs.
    pub fn new(cpus: u32, max: usize) -> Trace {
        let mut json = String::from("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[");
        for cpu in 0..cpus {
            let _ = writeln!(
                json,
                "{{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":1,\"tid\":{cpu},\
                 \"args\":{{\"name\":\"CPU {cpu}\"}}}},"
            );
        }
        Trace {
            json,
            began: vec![None; cpus as usize],
            left: max,
            dropped: 0,
        }
    }

    pub(crate) fn begin(&mut self, cpu: u32, task: u32, at_ns: u64) {
        self.began[cpu as usize] = Some((task, at_ns));
    }

    pub(crate) fn end(&mut self, cpu: u32, task: u32, group: &str, at_ns: u64) {
        let Some((began, start)) = self.began[cpu as usize].take() else {
            return;
        };
        assert_eq!(
            began, task,
            "a CPU's trace ends with the task that it began with"
        );
        if self.left == 0 {
            self.dropped += 1;
            return;
        }
        self.left -= 1;
        let name = serde_json::to_string(&format!("{group} {task}")).expect("a string serializes");
        let us = |ns: u64| ns as f64 / 1e3;
        let _ = writeln!(
            self.json,
            "{{\"ph\":\"X\",\"name\":{name},\"pid\":1,\"tid\":{cpu},\"ts\":{},\"dur\":{}}},",
            us(start),
            us(at_ns.saturating_sub(start)),
        );
    }

    /// The file's text, and the number of runs beyond the limit.
    pub fn finish(mut self) -> (String, u64) {
        let end = self.json.trim_end_matches([',', '\n']).len();
        self.json.truncate(end);
        self.json.push_str("]}\n");
        (self.json, self.dropped)
    }
}
