//! `slipstream events`: prints the events of engines; and the event plane of `serve`.

use std::collections::HashMap;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use clap::{Subcommand, ValueEnum};
use slipstream_base::text::{counted, foreign, foreign_json};
use slipstream_base::width::to_u16;
use slipstream_base::{BlockHash, RankId, WorkerId};
use slipstream_config::cluster::{Cluster, EventsConfig};
use slipstream_events::nats::NatsSubscriber;
use slipstream_events::zmq::{self, ZmqError, ZmqSubscriber};
use slipstream_events::{
    Event, EventPlane, EventPublisher, FpmMessage, KvEvent, KvEventBatch, PlaneOptions,
};
use slipstream_worker::{Resyncs, WorkerSpec};
use tokio::sync::mpsc;

use crate::out;

/// Starts the configured event plane for the ranks of `specs`; returns it, and a publisher for each
/// engine thread.
pub(crate) fn start(
    cluster: &Cluster,
    specs: &[WorkerSpec],
    threads: usize,
    fresh_buffers: bool,
) -> anyhow::Result<(Option<EventPlane>, Vec<EventPublisher>)> {
    let mut ranks = Vec::new();
    let (mut worker, mut offset) = (0, 0);
    for pool in &cluster.pools {
        for _ in 0..pool.workers {
            let here = specs.iter().any(|spec| spec.worker == WorkerId(worker));
            for dp_rank in 0..to_u16(pool.engine.data_parallel_size) {
                let worker = WorkerId(worker);
                if here {
                    ranks.push((RankId { worker, dp_rank }, offset));
                }
                offset += 1;
            }
            worker += 1;
        }
    }
    let options = PlaneOptions {
        ranks,
        threads,
        // One router, one block size: checked when the cluster file is read.
        block_size: cluster.pools[0].engine.block_size,
        root: BlockHash::root(&cluster.model.name, "", ""),
        fresh_buffers,
    };
    let started = EventPlane::start(&cluster.live.events, &options)?;
    Ok(match started {
        Some((plane, publishers)) => (Some(plane), publishers),
        None => (None, Vec::new()),
    })
}

/// Requests snapshots from ranks whose KV events were dropped.
pub(crate) fn resync_lost_kv(plane: &EventPlane, resyncs: Resyncs) {
    plane.on_lost_kv(move |rank| {
        resyncs.resync(rank);
    });
}

/// One line per address of the event plane.
pub(crate) fn addresses(plane: &EventPlane) -> Vec<String> {
    let addresses = plane.addresses();
    let fpm = addresses
        .fpm
        .iter()
        .map(|a| format!("forward-pass metrics at tcp://{a}"));
    let by_rank = |what: &'static str, list: &[std::net::SocketAddr]| {
        let lines = list.iter().enumerate();
        lines
            .map(|(rank, a)| format!("{what} of rank {rank} at tcp://{a}"))
            .collect::<Vec<_>>()
    };
    fpm.chain(by_rank("KV events", &addresses.kv))
        .chain(by_rank("past KV events", &addresses.replay))
        .collect()
}

/// Flags of `slipstream events`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the events of a bus as they arrive
    Tail(TailArgs),
    /// Print how much of a prompt an engine has cached, according to its KV events
    Cached(super::cached::Args),
}

#[derive(clap::Args)]
struct TailArgs {
    /// Bus to subscribe to
    #[arg(long, value_enum, default_value_t = TailBus::Zmq)]
    bus: TailBus,
    /// ZeroMQ address of a publisher; may be given several times
    /// [default: tcp://127.0.0.1:5556 and :5557, rank 0's KV events]
    #[arg(long, value_name = "tcp://HOST:PORT")]
    endpoint: Vec<String>,
    /// ZeroMQ, without --endpoint: KV events of this many ranks, at consecutive ports
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024), conflicts_with = "endpoint")]
    ranks: u16,
    /// ZeroMQ: only topics with this prefix
    #[arg(long, default_value = "")]
    topic: String,
    /// ZeroMQ: print past KV events from this sequence on, from a replay address, and exit
    #[arg(long, value_name = "SEQUENCE", requires = "endpoint")]
    replay_from: Option<u64>,
    /// NATS server
    #[arg(long, default_value = "nats://127.0.0.1:4222")]
    url: String,
    /// NATS subject; `*` stands for a word, `>` for the rest
    #[arg(long, default_value = "slipstream.>")]
    subject: String,
    /// Exit after this number of events
    #[arg(long, value_name = "EVENTS")]
    count: Option<u64>,
    /// One JSON object per line
    #[arg(long)]
    json: bool,
    /// Do not print events; count them, and missing ones
    #[arg(long, conflicts_with = "json")]
    quiet: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum TailBus {
    Zmq,
    Nats,
}

/// Runs `slipstream events`.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    // A pending name resolution in the background must not delay the exit.
    let code = match &args.command {
        Command::Tail(args) => runtime.block_on(tail(args)),
        Command::Cached(args) => runtime.block_on(super::cached::run(args)),
    };
    runtime.shutdown_timeout(Duration::from_millis(100));
    code
}

/// Message from a reader to the printer: an event, or an error.
type Found = (String, Result<Event, String>);

/// Counters of received events.
#[derive(Default)]
struct Tally {
    events: u64,
    bytes: u64,
    /// Messages that are not events.
    bad: u64,
    /// Events missing according to the sequences of each source and topic.
    missing: u64,
    next: HashMap<(String, Bytes), u64>,
}

impl Tally {
    fn note(&mut self, source: &str, event: &Event, sequence: Option<u64>) {
        self.events += 1;
        self.bytes += event.payload.len() as u64;
        let Some(sequence) = sequence else { return };
        let place = (source.to_owned(), event.topic.clone());
        let next = self.next.entry(place).or_insert(sequence);
        // A lower one is a publisher that restarted.
        self.missing += sequence.saturating_sub(*next);
        *next = sequence + 1;
    }
}

/// Prints events until the end, the limit, or an interrupt. Exits with 1 if any could not be read.
async fn tail(args: &TailArgs) -> anyhow::Result<ExitCode> {
    let (found, mut events) = mpsc::channel::<Found>(1024);
    match args.bus {
        TailBus::Nats => {
            let mut subscriber = NatsSubscriber::connect(&args.url, &args.subject).await?;
            errln!("subscribed to {} at {}", args.subject, args.url);
            let source = args.url.clone();
            tokio::spawn(async move {
                while let Some(event) = subscriber.recv().await {
                    if found.send((source.clone(), Ok(event))).await.is_err() {
                        return;
                    }
                }
            });
        }
        TailBus::Zmq => listen_zmq(args, found).await?,
    }
    let mut tally = Tally::default();
    let mut interrupt = std::pin::pin!(tokio::signal::ctrl_c());
    while args.count.is_none_or(|count| tally.events < count) {
        let received = tokio::select! {
            received = events.recv() => received,
            _ = &mut interrupt => None,
        };
        let Some((source, event)) = received else {
            break;
        };
        match event.and_then(|event| Ok((ReceivedEvent::read(&source, &event)?, event))) {
            Ok((received, event)) => {
                let sequence = event.sequence.or(received.message.counter());
                tally.note(&source, &event, sequence);
                if let Message::Kv(batch) = &received.message
                    && batch.unreadable.events > 0
                {
                    // Also if only some of its events cannot be read.
                    tally.bad += 1;
                }
                if !args.quiet {
                    out::print(&received.line(event.sequence, args.json))?;
                }
            }
            Err(message) => {
                tally.bad += 1;
                errln!("error: {message}");
            }
        }
    }
    let Tally {
        events,
        bytes,
        bad,
        missing,
        ..
    } = tally;
    if args.quiet {
        out::print(&format!(
            "{events} events, {bytes} bytes, {missing} missing, {bad} unreadable\n"
        ))?;
    } else if bad + missing > 0 {
        errln!(
            "{} missing, {} unreadable",
            counted(missing, "event"),
            counted(bad, "message")
        );
    }
    Ok(ExitCode::from(u8::from(bad > 0)))
}

async fn listen_zmq(args: &TailArgs, found: mpsc::Sender<Found>) -> anyhow::Result<()> {
    let default = EventsConfig::default();
    let endpoints = match &args.endpoint[..] {
        [] => {
            let (host, port) = default.kv_endpoint.rsplit_once(':').context("a port")?;
            let port: u16 = port.parse().context("a port")?;
            if args.ranks == 1 {
                errln!("note: KV events of rank 0 only; use --ranks N for more");
            }
            let ranks = (port..port.saturating_add(args.ranks)).map(|p| format!("{host}:{p}"));
            [default.fpm_endpoint].into_iter().chain(ranks).collect()
        }
        given => given.to_vec(),
    };
    for endpoint in endpoints {
        let found = found.clone();
        if let Some(start) = args.replay_from {
            let events = zmq::replay(&endpoint, start).await?;
            tokio::spawn(async move {
                for event in events {
                    if found.send((endpoint.clone(), Ok(event))).await.is_err() {
                        return;
                    }
                }
            });
            continue;
        }
        let mut subscriber = ZmqSubscriber::connect(&endpoint, &args.topic)
            .await
            .context("is a server with live.events.bus = \"zmq\" running?")?;
        errln!("subscribed to {endpoint}");
        tokio::spawn(async move {
            loop {
                let event = subscriber.recv().await;
                let more = event.as_ref().err().is_none_or(ZmqError::may_go_on);
                let event = event.map_err(|error| error.to_string());
                if found.send((endpoint.clone(), event)).await.is_err() || !more {
                    return;
                }
            }
        });
    }
    Ok(())
}

/// A decoded event.
struct ReceivedEvent {
    /// Its topic; if that is empty, as with KV events, the publisher's address.
    topic: String,
    source: String,
    message: Message,
}

impl ReceivedEvent {
    fn read(source: &str, event: &Event) -> Result<ReceivedEvent, String> {
        let topic = String::from_utf8_lossy(&event.topic).into_owned();
        let len = event.payload.len();
        match Message::decode(&topic, &event.payload) {
            Ok(message) => Ok(ReceivedEvent {
                topic,
                source: source.to_owned(),
                message,
            }),
            Err(error) => Err(format!("{source}: an event of {len} bytes: {error}")),
        }
    }

    /// The event as a line of text.
    fn line(&self, sequence: Option<u64>, json: bool) -> String {
        let ReceivedEvent {
            topic,
            source,
            message,
        } = self;
        if json {
            let event = message.json();
            let line = serde_json::json!({"topic": topic, "sequence": sequence, "event": event});
            return format!("{}\n", foreign_json(&line.to_string()));
        }
        let sequence = sequence.map_or(String::new(), |n| format!(" #{n}"));
        let topic = if topic.is_empty() { source } else { topic };
        let line = format!("{topic}{sequence} {}", message.text());
        format!("{}\n", foreign(&line))
    }
}

/// Content of an event.
enum Message {
    Fpm(Box<FpmMessage>),
    Kv(KvEventBatch),
}

impl Message {
    /// Forward-pass metrics have `.fpm.` in their topic. All others are KV events, whose topic is
    /// the engine's configuration.
    fn decode(topic: &str, payload: &[u8]) -> Result<Message, slipstream_events::DecodeError> {
        if topic.contains(".fpm.") {
            return FpmMessage::decode(payload).map(|fpm| Message::Fpm(Box::new(fpm)));
        }
        KvEventBatch::decode(payload).map(Message::Kv)
    }

    /// Number of a pass among those of its rank.
    fn counter(&self) -> Option<u64> {
        match self {
            Message::Fpm(fpm) => Some(fpm.counter_id),
            Message::Kv(_) => None,
        }
    }

    fn json(&self) -> serde_json::Value {
        let value = match self {
            Message::Fpm(fpm) => serde_json::to_value(fpm),
            Message::Kv(batch) => serde_json::to_value(batch),
        };
        value.expect("numbers and strings are JSON; NaN becomes null")
    }

    fn text(&self) -> String {
        match self {
            Message::Fpm(fpm) => {
                let (s, q) = (&fpm.scheduled_requests, &fpm.queued_requests);
                if fpm.wall_time == 0.0 && s.num_prefill_requests + s.num_decode_requests == 0 {
                    return format!("{}/dp{} idle", fpm.worker_id, fpm.dp_rank);
                }
                format!(
                    "{}/dp{} pass {} {:.3} ms: prefill {} ({}, {} cached), decode {} ({} of context); waiting {} + {}",
                    fpm.worker_id,
                    fpm.dp_rank,
                    fpm.counter_id,
                    fpm.wall_time * 1e3,
                    s.num_prefill_requests,
                    counted(s.sum_prefill_tokens, "token"),
                    s.sum_prefill_kv_tokens,
                    s.num_decode_requests,
                    counted(s.sum_decode_kv_tokens, "token"),
                    q.num_prefill_requests,
                    q.num_decode_requests,
                )
            }
            Message::Kv(batch) => {
                let events: Vec<String> = batch.events.iter().map(kv_text).collect();
                let rank = batch.data_parallel_rank.unwrap_or(0);
                let mut text = format!("dp{rank} {}", events.join("; "));
                if let Some(first) = &batch.unreadable.first {
                    let count = counted(batch.unreadable.events, "unreadable event");
                    text = format!("{text} ({count}: {first})");
                }
                text
            }
        }
    }
}

fn kv_text(event: &KvEvent) -> String {
    match event {
        KvEvent::BlockStored(stored) => format!(
            "stored {} of {} ({})",
            counted(stored.block_hashes.len() as u64, "block"),
            stored.block_size,
            match stored.token_ids.len() {
                0 => "tokens not known".to_owned(),
                tokens => counted(tokens as u64, "token"),
            }
        ),
        KvEvent::BlockRemoved(removed) => {
            let blocks = removed.block_hashes.len() as u64;
            format!("removed {}", counted(blocks, "block"))
        }
        KvEvent::AllBlocksCleared {} => "cleared all blocks".to_owned(),
        KvEvent::Unreadable { block_hashes: None } => {
            "unreadable; any block may be gone".to_owned()
        }
        KvEvent::Unreadable {
            block_hashes: Some(hashes),
        } => format!(
            "unreadable; names {}",
            counted(hashes.len() as u64, "block")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_counted_by_topic() {
        let event = |topic: &'static str, sequence| Event {
            topic: Bytes::from_static(topic.as_bytes()),
            sequence: Some(sequence),
            payload: Bytes::from_static(&[0; 3]),
        };
        let mut tally = Tally::default();
        for (topic, sequence) in [
            ("a", 5),
            ("b", 0),
            ("a", 6),
            ("a", 9),
            ("b", 1),
            ("a", 0),
            ("a", 1),
        ] {
            tally.note("here", &event(topic, sequence), Some(sequence));
        }
        assert_eq!((tally.events, tally.bytes, tally.missing), (7, 21, 2));
    }
}
