//! A run as a trace for Perfetto (<https://ui.perfetto.dev>) and Chrome: a process per engine, with
//! a track for its passes, one for its waiting queue, one per running request, and counters.
//!
//! Format: JSON array form of "Trace Event Format", Google, 2016. Its closing bracket may be
//! missing, so a truncated file still opens.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::partial::Partial;
use crate::pass::PassRecord;
use crate::series::EngineInfo;
use slipstream_base::width;

/// A request, ns of the run's clock.
#[derive(Clone, Copy, Debug)]
pub struct RequestSpan<'a> {
    /// The engine that ran it, an index into [`EngineInfo`]s.
    pub engine: u32,
    /// Its name.
    pub name: &'a str,
    /// A unique number.
    pub id: u64,
    /// When it was due.
    pub due: u64,
    /// Its KV transfer, if another engine computed the prompt.
    pub kv: Option<KvSpan>,
    /// When it left the waiting queue for the first time.
    pub admitted: u64,
    /// When its first token arrived.
    pub first: u64,
    /// When its last token arrived.
    pub last: u64,
    /// Prompt tokens.
    pub input_tokens: u32,
    /// Those found cached.
    pub cached_tokens: u32,
    /// Answer tokens.
    pub output_tokens: u32,
}

/// A KV transfer from one engine to another.
#[derive(Clone, Copy, Debug)]
pub struct KvSpan {
    /// The engine that computed the prompt.
    pub from: u32,
    /// When that engine's worker received the request.
    pub received: u64,
    /// When the transfer began.
    pub sent: u64,
    /// When it ended.
    pub came: u64,
}

/// Writes a trace, one event at a time.
pub struct PerfettoWriter<W: Write> {
    sink: W,
    /// The last values of each engine's counters: running, waiting, blocks.
    last: Vec<[u32; 3]>,
    /// Names of the engines.
    names: Vec<String>,
    events: u64,
    partial: Option<Partial>,
}

impl PerfettoWriter<BufWriter<File>> {
    /// Creates the file. It is called `NAME.partial` until [`finish`](Self::finish).
    ///
    /// # Errors
    /// If it cannot be created or written.
    pub fn create(path: &Path, engines: &[EngineInfo]) -> io::Result<Self> {
        let (file, partial) = Partial::create(path)?;
        let writer = PerfettoWriter::new(BufWriter::new(file), engines)?;
        Ok(PerfettoWriter {
            partial: Some(partial),
            ..writer
        })
    }
}

/// Processes are numbered from 1; viewers hide number 0.
fn pid(engine: u32) -> u32 {
    engine + 1
}

/// Microseconds, as the format requires, without losing the nanoseconds.
fn us(ns: u64) -> String {
    format!("{}.{:03}", ns / 1_000, ns % 1_000)
}

impl<W: Write> PerfettoWriter<W> {
    /// Begins a trace with the names of the engines.
    ///
    /// # Errors
    /// If `sink` fails.
    pub fn new(sink: W, engines: &[EngineInfo]) -> io::Result<Self> {
        let mut writer = PerfettoWriter {
            sink,
            last: vec![[u32::MAX; 3]; engines.len()],
            names: engines.iter().map(|engine| engine.name.clone()).collect(),
            events: 0,
            partial: None,
        };
        writer.sink.write_all(b"[")?;
        for (index, engine) in engines.iter().enumerate() {
            let pid = pid(width::to_u32(index));
            let name = serde_json::Value::from(format!("{} ({})", engine.name, engine.pool));
            writer.event(format_args!(
                "{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{pid},\"args\":{{\"name\":{name}}}}}"
            ))?;
            writer.event(format_args!(
                "{{\"ph\":\"M\",\"name\":\"process_sort_index\",\"pid\":{pid},\"args\":{{\"sort_index\":{pid}}}}}"
            ))?;
            writer.event(format_args!(
                "{{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":{pid},\"tid\":1,\"args\":{{\"name\":\"passes\"}}}}"
            ))?;
        }
        let network = pid(width::to_u32(engines.len()));
        writer.event(format_args!(
            "{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{network},\"args\":{{\"name\":\"network\"}}}}"
        ))?;
        Ok(writer)
    }

    fn event(&mut self, event: std::fmt::Arguments<'_>) -> io::Result<()> {
        let between: &[u8] = if self.events == 0 { b"\n" } else { b",\n" };
        self.sink.write_all(between)?;
        self.events += 1;
        self.sink.write_fmt(event)
    }

    /// A pass, and the counters that it changed.
    ///
    /// # Errors
    /// If the sink fails.
    ///
    /// # Panics
    /// If its engine is not in the list that the trace began with.
    pub fn pass(&mut self, pass: &PassRecord<'_>) -> io::Result<()> {
        let (prefill, decode) = (&pass.fpm.scheduled_prefill, &pass.fpm.scheduled_decode);
        let name = match (prefill.requests, decode.requests) {
            (0, _) => "decode",
            (_, 0) => "prefill",
            _ => "mixed",
        };
        let pid = pid(pass.engine);
        let (start, length) = (us(pass.start.0), us(pass.end.since(pass.start)));
        self.event(format_args!(
            "{{\"ph\":\"X\",\"cat\":\"pass\",\"name\":\"{name}\",\"pid\":{pid},\"tid\":1,\"ts\":{start},\
             \"dur\":{length},\"args\":{{\"counter\":{},\"prefill_requests\":{},\"prefill_tokens\":{},\
             \"decode_requests\":{},\"decode_kv_tokens\":{},\"output_tokens\":{},\"preemptions\":{}}}}}",
            pass.fpm.counter,
            prefill.requests,
            prefill.tokens,
            decode.requests,
            decode.kv_tokens,
            pass.tokens,
            pass.preemptions,
        ))?;
        let levels = [pass.sequences(), pass.waiting(), pass.used_blocks];
        let last = std::mem::replace(&mut self.last[pass.engine as usize], levels);
        if last[..2] != levels[..2] {
            self.event(format_args!(
                "{{\"ph\":\"C\",\"name\":\"sequences\",\"pid\":{pid},\"ts\":{start},\
                 \"args\":{{\"running\":{},\"waiting\":{}}}}}",
                levels[0], levels[1]
            ))?;
        }
        if last[2] != levels[2] {
            self.event(format_args!(
                "{{\"ph\":\"C\",\"name\":\"KV blocks held\",\"pid\":{pid},\"ts\":{start},\"args\":{{\"blocks\":{}}}}}",
                levels[2]
            ))?;
        }
        Ok(())
    }

    /// A request that was answered: its wait on one track, its prefill and decode on another.
    ///
    /// # Errors
    /// If the sink fails.
    pub fn request(&mut self, r: &RequestSpan<'_>) -> io::Result<()> {
        let pid = pid(r.engine);
        let name = serde_json::Value::from(r.name);
        let mut span = |cat: &str, name: &dyn std::fmt::Display, from: u64, to: u64, args: &str| {
            let id = r.id;
            for (ph, at, args) in [("b", from, args), ("e", to, "")] {
                self.event(format_args!(
                    "{{\"ph\":\"{ph}\",\"cat\":\"{cat}\",\"name\":{name},\"id\":\"{id:x}\",\"pid\":{pid},\
                     \"tid\":1,\"ts\":{}{args}}}",
                    us(at)
                ))?;
            }
            Ok::<(), io::Error>(())
        };
        // A prompt that another engine computed waits and is computed there.
        let here = r.kv.map_or(r.due, |kv| kv.came);
        if r.admitted > here {
            span("waiting", &name, here, r.admitted, "")?;
        }
        let args = format!(
            ",\"args\":{{\"input_tokens\":{},\"cached_tokens\":{},\"output_tokens\":{}}}",
            r.input_tokens, r.cached_tokens, r.output_tokens
        );
        span("request", &name, r.admitted, r.last, &args)?;
        span("request", &"\"prefill\"", r.admitted, r.first, "")?;
        if r.last > r.first {
            span("request", &"\"decode\"", r.first, r.last, "")?;
        }
        if let Some(kv) = r.kv {
            self.kv_transfer(r, &kv)?;
        }
        Ok(())
    }

    /// A prompt on the engine that computed it, and its KV transfer.
    fn kv_transfer(&mut self, r: &RequestSpan<'_>, kv: &KvSpan) -> io::Result<()> {
        let name = serde_json::Value::from(r.name);
        let name_of = |engine: u32| self.names.get(engine as usize).map_or("?", String::as_str);
        let path = format!("{} to {}", name_of(kv.from), name_of(r.engine));
        let path = serde_json::Value::from(path);
        // The network is listed after the engines.
        let network = pid(width::to_u32(self.names.len()));
        let (from, id) = (pid(kv.from), r.id);
        for (ph, prompt, sent) in [("b", kv.received, kv.sent), ("e", kv.sent, kv.came)] {
            self.event(format_args!(
                "{{\"ph\":\"{ph}\",\"cat\":\"prompt\",\"name\":{name},\"id\":\"{id:x}\",\"pid\":{from},\
                 \"tid\":1,\"ts\":{}}}",
                us(prompt)
            ))?;
            self.event(format_args!(
                "{{\"ph\":\"{ph}\",\"cat\":\"KV transfer\",\"name\":{path},\"id\":\"{id:x}\",\"pid\":{network},\
                 \"tid\":1,\"ts\":{}}}",
                us(sent)
            ))?;
        }
        Ok(())
    }

    /// Completes the file.
    ///
    /// # Errors
    /// If the sink fails.
    pub fn finish(&mut self) -> io::Result<()> {
        self.sink.write_all(b"\n]\n")?;
        self.sink.flush()?;
        self.partial.as_mut().map_or(Ok(()), Partial::complete)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use serde_json::Value;
    use slipstream_base::fpm::DecodeStats;
    use slipstream_base::{ForwardPassMetrics, SimTime};

    use super::*;

    #[test]
    fn what_is_written_parses_and_spans_close() {
        let engine = EngineInfo {
            name: "w\"0".into(),
            pool: "main".into(),
            worker: 0,
            dp_rank: 0,
            blocks: 10,
            sequences_max: 4,
        };
        let mut bytes = Vec::new();
        let mut writer = PerfettoWriter::new(&mut bytes, &[engine]).unwrap();
        let fpm = ForwardPassMetrics {
            scheduled_decode: DecodeStats {
                requests: 3,
                ..DecodeStats::default()
            },
            ..ForwardPassMetrics::default()
        };
        let mut pass = PassRecord {
            engine: 0,
            start: SimTime(1_500),
            end: SimTime(3_001_500),
            fpm: &fpm,
            tokens: 3,
            used_blocks: 7,
            preemptions: 0,
            gaps: &[],
            arrived: &[],
        };
        writer.pass(&pass).unwrap();
        (pass.start, pass.end) = (pass.end, SimTime(6_001_500));
        writer.pass(&pass).unwrap();
        writer
            .request(&RequestSpan {
                engine: 0,
                name: "0.0",
                id: 17,
                due: 0,
                kv: None,
                admitted: 1_500,
                first: 3_001_500,
                last: 6_001_500,
                input_tokens: 5,
                cached_tokens: 0,
                output_tokens: 2,
            })
            .unwrap();
        let kv = KvSpan {
            from: 0,
            received: 10,
            sent: 20,
            came: 1_000,
        };
        writer
            .request(&RequestSpan {
                engine: 0,
                name: "1.0",
                id: 18,
                due: 0,
                kv: Some(kv),
                admitted: 1_000,
                first: 3_001_500,
                last: 3_001_500,
                input_tokens: 5,
                cached_tokens: 0,
                output_tokens: 1,
            })
            .unwrap();
        writer.finish().unwrap();
        let events: Vec<Value> = serde_json::from_slice(&bytes).unwrap();
        let with = |ph: &str| events.iter().filter(|e| e["ph"] == ph).collect::<Vec<_>>();
        let passes = with("X");
        assert_eq!(passes.len(), 2);
        assert_eq!(
            (&passes[0]["ts"], &passes[0]["dur"]),
            (&1.5.into(), &3_000.0.into())
        );
        // Nothing changed in the second pass, so counters are written once.
        assert_eq!(with("C").len(), 2);
        let mut open: HashMap<(String, String), i32> = HashMap::new();
        for event in &events {
            let key = (event["cat"].to_string(), event["name"].to_string());
            match event["ph"].as_str() {
                Some("b") => *open.entry(key).or_default() += 1,
                Some("e") => *open.entry(key).or_default() -= 1,
                _ => {}
            }
        }
        // Of the first: waiting, request, prefill, decode; of the second: request, prompt, transfer.
        assert_eq!(open.len(), 7);
        assert!(open.values().all(|n| *n == 0), "{open:?}");
    }
}
