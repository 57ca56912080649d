//! `slipstream events`: prints the events of engines; and the event plane of `serve`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Subcommand, ValueEnum};
use slipstream_base::WorkerId;
use slipstream_base::text::counted;
use slipstream_config::cluster::{Cluster, EventsConfig};
use slipstream_events::received::{Message, ReceivedEvent, Tally};
use slipstream_events::zmq::{self, ZmqError, ZmqSubscriber};
use slipstream_events::{Event, EventPlane, EventPublisher, PlaneOptions};
use slipstream_worker::{Resyncs, WorkerSpec};
use tokio::sync::mpsc;

use crate::out;

/// Starts the configured event plane for the ranks of `specs`; returns it, and a publisher for each
/// engine thread.
pub(crate) fn start(
    cluster: &Cluster,
    specs: &[WorkerSpec],
    threads: usize,
) -> anyhow::Result<(Option<EventPlane>, Vec<EventPublisher>)> {
    let runs = |worker: WorkerId| specs.iter().any(|spec| spec.worker == worker);
    let options = PlaneOptions::of_cluster(cluster, runs, threads);
    let (plane, publishers) = EventPlane::start(&cluster.live.events, &options)?.unzip();
    Ok((plane, publishers.unwrap_or_default()))
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

/// The publishers of KV events by rank, in the form of vLLM's `/kv_event_sources`; `None` if there are none.
pub(crate) fn kv_event_sources(plane: &EventPlane) -> Option<String> {
    let addresses = plane.addresses();
    let by_rank = addresses.kv.iter().enumerate().map(|(rank, address)| {
        let replay = addresses.replay.get(rank);
        let source = serde_json::json!({
            "publisher": "zmq",
            "endpoint": format!("tcp://{address}"),
            "replay_endpoint": replay.map(|address| format!("tcp://{address}")),
            "topic": "",
        });
        (rank.to_string(), source)
    });
    let by_rank: serde_json::Map<String, serde_json::Value> = by_rank.collect();
    (!by_rank.is_empty()).then(|| serde_json::Value::Object(by_rank).to_string())
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

/// Prints events until the end, the limit, or an interrupt. Exits with 1 if any could not be read.
async fn tail(args: &TailArgs) -> anyhow::Result<ExitCode> {
    let (found, mut events) = mpsc::channel::<Found>(1024);
    match args.bus {
        TailBus::Nats => listen_nats(args, found).await?,
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

#[cfg(feature = "nats")]
async fn listen_nats(args: &TailArgs, found: mpsc::Sender<Found>) -> anyhow::Result<()> {
    use slipstream_events::nats::NatsSubscriber;
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
    Ok(())
}

#[cfg(not(feature = "nats"))]
#[expect(clippy::unused_async)] // as the function above
async fn listen_nats(args: &TailArgs, _: mpsc::Sender<Found>) -> anyhow::Result<()> {
    Err(slipstream_events::NatsError::not_built(&args.url).into())
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
