//! `slipstream events`: what engines publish; and the event plane of `serve`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Subcommand, ValueEnum};
use slipstream_base::cluster::{Cluster, EventsConfig};
use slipstream_base::{BlockHash, RankId, WorkerId};
use slipstream_events::nats::NatsSubscriber;
use slipstream_events::zmq::{self, ZmqError, ZmqSubscriber};
use slipstream_events::{
    Event, EventPlane, EventPublisher, FpmMessage, KvEvent, KvEventBatch, PlaneOptions,
};
use slipstream_worker::{Resyncs, WorkerSpec};
use tokio::sync::mpsc;

use crate::out;

/// Starts the event plane that the cluster file asks for, for the ranks of `specs`: it, and a
/// publisher for each engine thread.
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
            for dp_rank in 0..pool.engine.data_parallel_size as u16 {
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
        // One router, one block size: the cluster file's reader holds that.
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

/// Sees to it that ranks whose KV events were dropped publish what they hold.
pub(crate) fn mend_losses(plane: &EventPlane, resyncs: Resyncs) {
    plane.on_lost_kv(move |rank| {
        resyncs.resync(rank);
    });
}

/// A line for each address at which events can be had.
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
    /// Print the events of a bus as they come
    Tail(TailArgs),
}

#[derive(clap::Args)]
struct TailArgs {
    /// Bus to listen to
    #[arg(long, value_enum, default_value_t = TailBus::Zmq)]
    bus: TailBus,
    /// ZeroMQ address of a publisher; may be given several times
    /// [default: tcp://127.0.0.1:5556 and :5557]
    #[arg(long, value_name = "tcp://HOST:PORT")]
    endpoint: Vec<String>,
    /// ZeroMQ: only topics that begin with this
    #[arg(long, default_value = "")]
    topic: String,
    /// ZeroMQ: print past KV events from this sequence on, of a replay address, and end
    #[arg(long, value_name = "SEQUENCE", requires = "endpoint")]
    replay_from: Option<u64>,
    /// NATS server
    #[arg(long, default_value = "nats://127.0.0.1:4222")]
    url: String,
    /// NATS subject; `*` stands for a word, `>` for the rest
    #[arg(long, default_value = "slipstream.>")]
    subject: String,
    /// End after so many events
    #[arg(long, value_name = "EVENTS")]
    count: Option<u64>,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum TailBus {
    Zmq,
    Nats,
}

/// Runs `slipstream events`.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Command::Tail(args) = &args.command;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    // What the system resolves in the background must not hold up the end.
    let code = runtime.block_on(tail(args));
    runtime.shutdown_timeout(Duration::from_millis(100));
    code
}

/// What the readers pass to the printer: an event, or why there is none.
type Found = (String, Result<Event, String>);

/// Prints events until there are no more. 1 if any could not be read.
async fn tail(args: &TailArgs) -> anyhow::Result<ExitCode> {
    let (found, mut events) = mpsc::channel::<Found>(1024);
    match args.bus {
        TailBus::Nats => {
            let mut subscriber = NatsSubscriber::connect(&args.url, &args.subject).await?;
            eprintln!("listening to {} at {}", args.subject, args.url);
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
    let mut bad = 0u64;
    let mut printed = 0u64;
    while args.count.is_none_or(|count| printed < count) {
        let Some((source, event)) = events.recv().await else {
            break;
        };
        let read = event.and_then(|event| {
            let line = line(&event, args.json).map_err(|error| {
                format!(
                    "{source}: an event of {} bytes: {error}",
                    event.payload.len()
                )
            })?;
            Ok(line)
        });
        match read {
            Ok(line) => {
                out::print(&line)?;
                printed += 1;
            }
            Err(message) => {
                bad += 1;
                eprintln!("error: {message}");
            }
        }
    }
    if bad > 0 {
        eprintln!("{bad} messages could not be read");
    }
    Ok(ExitCode::from(u8::from(bad > 0)))
}

async fn listen_zmq(args: &TailArgs, found: mpsc::Sender<Found>) -> anyhow::Result<()> {
    let default = EventsConfig::default();
    let endpoints = match &args.endpoint[..] {
        [] => vec![default.fpm_endpoint, default.kv_endpoint],
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
        eprintln!("listening to {endpoint}");
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

/// An event as a line of text.
fn line(event: &Event, json: bool) -> Result<String, slipstream_events::DecodeError> {
    let topic = String::from_utf8_lossy(&event.topic);
    let sequence = event.sequence;
    let message = Message::decode(&topic, &event.payload)?;
    if json {
        let line =
            serde_json::json!({"topic": topic, "sequence": sequence, "event": message.json()});
        return Ok(format!("{line}\n"));
    }
    let sequence = sequence.map_or(String::new(), |n| format!(" #{n}"));
    let topic = if topic.is_empty() { "-" } else { &topic };
    Ok(format!("{topic}{sequence} {}\n", message.text()))
}

/// What an event says.
enum Message {
    Fpm(Box<FpmMessage>),
    Kv(KvEventBatch),
}

impl Message {
    /// Forward-pass metrics have `.fpm.` in their topic; all else is KV events, whose topic is as
    /// the engine was told.
    fn decode(topic: &str, payload: &[u8]) -> Result<Message, slipstream_events::DecodeError> {
        if topic.contains(".fpm.") {
            return FpmMessage::decode(payload).map(|fpm| Message::Fpm(Box::new(fpm)));
        }
        KvEventBatch::decode(payload).map(Message::Kv)
    }

    fn json(&self) -> serde_json::Value {
        let value = match self {
            Message::Fpm(fpm) => serde_json::to_value(fpm),
            Message::Kv(batch) => serde_json::to_value(batch),
        };
        value.expect("numbers and strings are JSON; a number that is none becomes null")
    }

    fn text(&self) -> String {
        match self {
            Message::Fpm(fpm) => {
                let (s, q) = (&fpm.scheduled_requests, &fpm.queued_requests);
                format!(
                    "{}/dp{} pass {} {:.3} ms: prefill {} ({} tokens, {} cached), decode {} ({} tokens \
                     of context); waiting {} + {}",
                    fpm.worker_id,
                    fpm.dp_rank,
                    fpm.counter_id,
                    fpm.wall_time * 1e3,
                    s.num_prefill_requests,
                    s.sum_prefill_tokens,
                    s.sum_prefill_kv_tokens,
                    s.num_decode_requests,
                    s.sum_decode_kv_tokens,
                    q.num_prefill_requests,
                    q.num_decode_requests,
                )
            }
            Message::Kv(batch) => {
                let events: Vec<String> = batch.events.iter().map(kv_text).collect();
                let rank = batch.data_parallel_rank.unwrap_or(0);
                format!("dp{rank} {}", events.join("; "))
            }
        }
    }
}

fn kv_text(event: &KvEvent) -> String {
    match event {
        KvEvent::BlockStored {
            block_hashes,
            token_ids,
            block_size,
            ..
        } => format!(
            "stored {} blocks of {block_size} ({})",
            block_hashes.len(),
            match token_ids.len() {
                0 => "tokens not known".to_owned(),
                tokens => format!("{tokens} tokens"),
            }
        ),
        KvEvent::BlockRemoved { block_hashes, .. } => {
            format!("removed {} blocks", block_hashes.len())
        }
        KvEvent::AllBlocksCleared {} => "cleared all blocks".to_owned(),
    }
}
