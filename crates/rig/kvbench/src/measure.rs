//! Benchmarks of the store: the cases of `slipstream-kvbench`.
//!
//! Transfers are measured between two processes; [`serve`] runs in the second. Every case compares
//! some of the received blocks with the stored ones.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use slipstream_base::mix::draw;
use slipstream_base::width::{floor_u64, to_u32, to_usize};
use slipstream_base::{BlockHash, SimTime};
use slipstream_kvindex::{Change, KeySet, PeerIndex, digest};

use slipstream_kvstore::{
    Address, BlockEndpoint, BlockTransport, Completion, DiskOptions, DiskTier, EndpointOptions,
    Fetch, MemoryOptions, MemoryTier, Nixl, NixlOptions, PeerId, Profile, Region, Tier, TierError,
    TransferId, TransportError, TransportEvent, checksum, clock,
};

const DEADLINE: Duration = Duration::from_secs(30);
const SIZES: [usize; 4] = [4 << 10, 32 << 10, 64 << 10, 1 << 20];
/// Between isolated transfers: longer than any thread spins.
const APART: Duration = Duration::from_millis(1);
/// Keys per message of a snapshot.
const CHUNK: usize = 1_024;

/// Size of the benchmark.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// Multiplies the repetitions of each case.
    pub(crate) scale: f64,
    /// How long the threads of both transports spin before they sleep.
    pub(crate) spin: Duration,
    /// NIXL's library; `None`: skips the cases with NIXL.
    pub(crate) nixl: Option<PathBuf>,
}

impl Options {
    /// Bytes of blocks that the serving side holds per size: more than the private caches, unless
    /// `scale` is small.
    fn served_bytes(&self) -> usize {
        to_usize(floor_u64(self.scale * 1e9)).clamp(8 << 20, 128 << 20) & !((1 << 20) - 1)
    }

    fn nixl(&self, staging_bytes: usize) -> Nixl {
        self.nixl.as_ref().map_or(Nixl::Off, |library| {
            Nixl::On(NixlOptions {
                staging_bytes,
                ..NixlOptions::new(library)
            })
        })
    }
}

/// One result.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    /// Component of the store.
    pub(crate) part: &'static str,
    /// Description of the case.
    pub(crate) what: String,
    /// The result; the median of durations.
    pub(crate) value: f64,
    /// The 99th percentile of durations, if there are at least 100 samples.
    pub(crate) p99: Option<f64>,
    /// Unit of `value` and `p99`.
    pub(crate) unit: &'static str,
    /// Target: a lower limit of a rate, or an upper limit of a duration.
    pub(crate) target: Option<f64>,
}

impl Row {
    fn new(part: &'static str, what: impl Into<String>, value: f64, unit: &'static str) -> Row {
        Row {
            part,
            what: what.into(),
            value,
            p99: None,
            unit,
            target: None,
        }
    }

    fn time(part: &'static str, what: impl Into<String>, times_us: &mut [f64]) -> Row {
        times_us.sort_by(f64::total_cmp);
        Row {
            // With fewer samples this would be the maximum.
            p99: (times_us.len() >= 100).then(|| at(times_us, 0.99)),
            ..Row::new(part, what, at(times_us, 0.5), "us")
        }
    }

    fn target(self, target: f64) -> Row {
        Row {
            target: Some(target),
            ..self
        }
    }

    /// Whether the target is met; `None` without a target.
    pub(crate) fn is_met(&self) -> Option<bool> {
        let target = self.target?;
        Some(if self.unit == "us" {
            self.value <= target
        } else {
            self.value >= target
        })
    }
}

/// Why a benchmark failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MeasureError {
    /// A tier cannot be opened or used.
    #[error(transparent)]
    Tier(#[from] TierError),
    /// The transport cannot be started.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// A pipe or a file cannot be read or written.
    #[error("the benchmark failed")]
    Io(#[from] std::io::Error),
    /// A transfer failed, or delivered other bytes.
    #[error("{0}")]
    Wrong(String),
}

fn at(sorted: &[f64], part: f64) -> f64 {
    sorted[to_usize(floor_u64((sorted.len() - 1) as f64 * part))]
}

fn profile() -> Profile {
    Profile {
        model: "bench".into(),
        ..Profile::default()
    }
}

fn key(size: usize, n: u64) -> [u8; 36] {
    let mut key = [0; 36];
    for (word, bytes) in key.chunks_mut(8).enumerate() {
        let drawn = draw(size as u64, n * 8 + word as u64);
        bytes.copy_from_slice(&drawn.to_le_bytes()[..bytes.len()]);
    }
    key
}

fn fill(out: &mut [u8], n: u64) {
    for (word, bytes) in out.chunks_mut(8).enumerate() {
        bytes.copy_from_slice(&draw(n, word as u64).to_le_bytes()[..bytes.len()]);
    }
}

/// Stores blocks of every size and serves them at a socket in `folder` and at a TCP port. Writes
/// the addresses to `out`, and ends at the end of `until`.
///
/// # Errors
///
/// [`MeasureError`].
pub(crate) fn serve(
    options: &Options,
    folder: &Path,
    mut until: impl Read,
    mut out: impl Write,
) -> Result<(), MeasureError> {
    let mut endpoints = Vec::new();
    let (served_bytes, spin) = (options.served_bytes(), options.spin);
    for size in SIZES {
        let tier = MemoryTier::new(MemoryOptions {
            // Peers may pin half of the memory.
            bytes: 2 * served_bytes,
            block_bytes: size,
            ttl_ns: None,
        })?;
        let mut block = vec![0; size];
        for n in 0..(served_bytes / size) as u64 {
            fill(&mut block, n);
            tier.put(clock::now(), &key(size, n), &block)?;
        }
        let mut listen = vec![
            Address::Unix(folder.join(size.to_string())),
            Address::Tcp(([127, 0, 0, 1], 0).into()),
        ];
        if options.nixl.is_some() {
            listen.push(Address::Nixl(([127, 0, 0, 1], 0).into()));
        }
        let endpoint = BlockEndpoint::start(EndpointOptions {
            listen,
            serves: Some(tier),
            spin,
            nixl: options.nixl(0), // this side reads no blocks
            ..EndpointOptions::new("bench-server", profile())
        })?;
        for address in endpoint.addresses() {
            writeln!(out, "{size} {address}")?;
        }
        endpoints.push(endpoint);
    }
    writeln!(out, "ready")?;
    out.flush()?;
    std::io::copy(&mut until, &mut std::io::sink())?;
    Ok(())
}

/// A connection to the other process.
struct Client {
    endpoint: BlockEndpoint,
    peer: PeerId,
    size: usize,
    /// Blocks stored by the other process.
    blocks: u64,
    events: Vec<TransportEvent>,
}

impl Client {
    fn connect(
        size: usize,
        address: &Address,
        verify: bool,
        options: &Options,
    ) -> Result<Client, MeasureError> {
        let spin = options.spin;
        let endpoint = BlockEndpoint::start(EndpointOptions {
            verify,
            spin,
            nixl: match address {
                Address::Nixl(_) => options.nixl(64 << 20),
                _ => Nixl::Off,
            },
            ..EndpointOptions::new("bench-client", profile())
        })?;
        let peer = endpoint
            .connect(address)
            .map_err(|error| MeasureError::Wrong(error.to_string()))?;
        let mut client = Client {
            endpoint,
            peer,
            size,
            blocks: (options.served_bytes() / size) as u64,
            events: Vec::new(),
        };
        match client.next(true) {
            TransportEvent::Up { .. } => Ok(client),
            other => Err(MeasureError::Wrong(format!("no connection: {other:?}"))),
        }
    }

    /// Returns the next event. Polls continuously, or with pauses if `with_pauses`, as an engine's
    /// worker does between two steps.
    fn next(&mut self, with_pauses: bool) -> TransportEvent {
        loop {
            if let Some(event) = self.events.pop() {
                return event;
            }
            if self.endpoint.poll(1, &mut self.events) > 0 {
                continue;
            }
            if with_pauses {
                std::thread::sleep(Duration::from_micros(100));
            } else {
                std::hint::spin_loop();
            }
        }
    }

    fn submit(
        &self,
        region: &Arc<Region>,
        first: u64,
        count: u64,
        at: usize,
    ) -> Result<TransferId, MeasureError> {
        let blocks = self.blocks;
        let keys: Vec<_> = (first..first + count)
            .map(|n| key(self.size, n % blocks))
            .collect();
        let fetches: Vec<_> = keys
            .iter()
            .enumerate()
            .map(|(n, key)| Fetch {
                key,
                at: at + n * self.size,
                len: self.size,
            })
            .collect();
        let submitted = self.endpoint.fetch(self.peer, region, &fetches, DEADLINE);
        submitted.map_err(|error| MeasureError::Wrong(error.to_string()))
    }

    fn finish(&mut self, with_pauses: bool) -> Result<Completion, MeasureError> {
        match self.next(with_pauses) {
            TransportEvent::Done(done) if done.failed.is_empty() => Ok(done),
            other => Err(MeasureError::Wrong(format!("a transfer failed: {other:?}"))),
        }
    }

    /// Bytes per second, and bytes per second of this process's CPU time, with `depth` transfers of
    /// `batch` blocks in flight.
    fn throughput(
        &mut self,
        batch: u64,
        depth: usize,
        bytes: u64,
    ) -> Result<[f64; 2], MeasureError> {
        let span = to_usize(batch) * self.size;
        let region = Region::new(span * depth);
        let mut next = 0;
        let mut in_flight = HashMap::new();
        for at in 0..depth {
            let id = self.submit(&region, next, batch, at * span)?;
            in_flight.insert(id, (next, at));
            next += batch;
        }
        let mut received = 0;
        let mut rounds = 0;
        let now = || [wall_s(), process_cpu_s()];
        let mut start = now();
        let mut end = start;
        while received < bytes {
            let done = self.finish(true)?;
            received += done.bytes;
            rounds += 1;
            end = now();
            let (first, at) = Client::position_of(&mut in_flight, &done)?;
            // The first round touches every page and wakes every thread, so it is not measured.
            if rounds == 2 * depth {
                self.compare(&region, first, at * span)?;
                (received, start) = (0, now());
            }
            let id = self.submit(&region, next, batch, at * span)?;
            in_flight.insert(id, (next, at));
            next += batch;
        }
        while !in_flight.is_empty() {
            let done = self.finish(true)?;
            let (first, at) = Client::position_of(&mut in_flight, &done)?;
            self.compare(&region, first, at * span)?;
        }
        Ok(std::array::from_fn(|clock| {
            received as f64 / (end[clock] - start[clock])
        }))
    }

    /// Transfers complete in any order.
    fn position_of<T>(
        in_flight: &mut HashMap<TransferId, T>,
        done: &Completion,
    ) -> Result<T, MeasureError> {
        let found = in_flight.remove(&done.transfer);
        found.ok_or_else(|| MeasureError::Wrong(format!("unexpected completion {done:?}")))
    }

    fn compare(&self, region: &Arc<Region>, n: u64, at: usize) -> Result<(), MeasureError> {
        let blocks = self.blocks;
        let (mut right, mut received) = (vec![0; self.size], vec![0; self.size]);
        fill(&mut right, n % blocks);
        let read = region.read(at, &mut received);
        if read.is_err() || right != received {
            return Err(MeasureError::Wrong(format!(
                "block {n} differs from the stored block"
            )));
        }
        Ok(())
    }

    /// Latency of single transfers, µs, and the CPU time per transfer of both processes, µs,
    /// without that of the polling thread.
    fn latencies(
        &mut self,
        batch: u64,
        rounds: usize,
        apart: Duration,
        other: u32,
    ) -> Result<(Vec<f64>, f64), MeasureError> {
        let region = Region::new(to_usize(batch) * self.size);
        let mut times = Vec::with_capacity(rounds);
        let cpu = || Ok::<_, MeasureError>(process_cpu_s() * 1e6 - cpu_us() + cpu_of_us(other)?);
        let mut before = cpu()?;
        for round in 0..rounds + rounds / 10 {
            if round == rounds / 10 {
                before = cpu()?;
            }
            let first = round as u64 * batch;
            let start = Instant::now();
            self.submit(&region, first, batch, 0)?;
            self.finish(false)?;
            if round >= rounds / 10 {
                times.push(start.elapsed().as_secs_f64() * 1e6);
            }
            if !apart.is_zero() {
                std::thread::sleep(apart);
            }
        }
        let spent = cpu()? - before;
        let last = (rounds + rounds / 10 - 1) as u64 * batch;
        self.compare(&region, last, 0)?;
        Ok((times, spent / rounds as f64))
    }

    /// Duration of one poll of a busy transport, µs.
    fn polls(&mut self, rounds: usize) -> Result<Vec<f64>, MeasureError> {
        let region = Region::new(8 * self.size);
        let mut times = Vec::with_capacity(rounds);
        let mut in_flight = HashMap::new();
        for at in 0..8 {
            let id = self.submit(&region, at as u64, 1, at * self.size)?;
            in_flight.insert(id, at);
        }
        let mut events = Vec::new();
        while times.len() < rounds {
            let start = Instant::now();
            self.endpoint.poll(64, &mut events);
            times.push(start.elapsed().as_secs_f64() * 1e6);
            for event in events.drain(..) {
                let TransportEvent::Done(done) = event else {
                    return Err(MeasureError::Wrong(format!(
                        "the connection ended: {event:?}"
                    )));
                };
                let at = Client::position_of(&mut in_flight, &done)?;
                let id = self.submit(&region, times.len() as u64, 1, at * self.size)?;
                in_flight.insert(id, at);
            }
            // Stands for about 20 µs of the engine's own work.
            let until = Instant::now() + Duration::from_micros(20);
            while Instant::now() < until {
                std::hint::spin_loop();
            }
        }
        for _ in in_flight {
            self.finish(false)?;
        }
        Ok(times)
    }
}

/// Measures transfers from the process `other` at `addresses`, the output of [`serve`].
///
/// # Errors
///
/// [`MeasureError`].
pub(crate) fn transfers(
    options: &Options,
    addresses: &[(usize, Address)],
    other: u32,
) -> Result<Vec<Row>, MeasureError> {
    let times = |n: f64| to_usize(floor_u64(n * options.scale)).max(20);
    let bytes = |n: u64| floor_u64(n as f64 * options.scale);
    let mut rows = Vec::new();
    let [small, middle, medium, large] = SIZES;
    let nixl = options.nixl.as_ref().map(|_| "NIXL");
    for name in ["shared memory", "TCP"].into_iter().chain(nixl) {
        let is_shared = name == "shared memory";
        let client = |size: usize, verify| {
            let (_, address) = addresses
                .iter()
                .find(|(of, address)| *of == size && name_of(address) == name)
                .ok_or_else(|| {
                    MeasureError::Wrong("the other process printed no address".into())
                })?;
            Client::connect(size, address, verify, options)
        };
        let row = |what: String, value, unit| Row::new("transfer", what, value, unit);
        for verify in [false, true] {
            let [rate, per_cpu] = client(large, verify)?.throughput(4, 4, bytes(8 << 30))?;
            let how = if verify {
                "with checksum"
            } else {
                "no checksum"
            };
            let what = format!("{name}, 1 MiB blocks, {how}");
            let target = match (name, verify) {
                ("shared memory", false) => Some(8.0),
                ("shared memory", true) => Some(4.0),
                ("TCP", _) => Some(3.0),
                _ => None,
            };
            rows.push(Row {
                target,
                ..row(what, rate / 1e9, "GB/s")
            });
            let what = "  same, per CPU second of the receiver";
            rows.push(row(what.into(), per_cpu / 1e9, "GB/s"));
        }
        for (size, batch, said) in [(medium, 64, "64 KiB"), (small, 256, "4 KiB")] {
            let [rate, _] = client(size, true)?.throughput(batch, 4, bytes(2 << 30))?;
            let what = format!("{name}, {said} blocks, with checksum");
            rows.push(row(what, rate / 1e9, "GB/s"));
        }
        for (size, rounds, said) in [
            (small, 20_000.0, "4 KiB"),
            (medium, 10_000.0, "64 KiB"),
            (large, 2_000.0, "1 MiB"),
        ] {
            let rounds = times(rounds);
            let (mut latencies, cpu) =
                client(size, true)?.latencies(1, rounds, Duration::ZERO, other)?;
            let what = format!("{name}, one block of {said}");
            let time = Row::time("transfer", what, &mut latencies);
            let is_marked = is_shared && size == small;
            rows.push(if is_marked { time.target(20.0) } else { time });
            let what = "  same, CPU time of both sides";
            rows.push(row(what.into(), cpu, "us"));
        }
        let (mut latencies, cpu) =
            client(small, true)?.latencies(1, times(2_000.0), APART, other)?;
        let what = format!("{name}, one block of 4 KiB, 1 ms after the previous one");
        rows.push(Row::time("transfer", what, &mut latencies));
        let what = "  same, CPU time of both sides";
        rows.push(row(what.into(), cpu, "us"));
        let (mut latencies, _) =
            client(middle, true)?.latencies(256, times(300.0), Duration::ZERO, other)?;
        let what = format!("{name}, 256 blocks of 32 KiB");
        rows.push(Row::time("transfer", what, &mut latencies));
        let mut polls = client(middle, true)?.polls(times(20_000.0))?;
        let what = format!("{name}, a poll while blocks arrive");
        rows.push(Row::time("transfer", what, &mut polls).target(5.0));
    }
    Ok(rows)
}

fn name_of(address: &Address) -> &'static str {
    match address {
        Address::Unix(_) => "shared memory",
        Address::Tcp(_) => "TCP",
        Address::Nixl(_) => "NIXL",
    }
}

/// Measures memory and disk, with files below `folder`.
///
/// # Errors
///
/// [`MeasureError`].
pub(crate) fn tiers(options: &Options, folder: &Path) -> Result<Vec<Row>, MeasureError> {
    let size = 1 << 20;
    let count = 64;
    let mut block = vec![0; size];
    let mut rows = Vec::new();
    let memory = MemoryTier::new(MemoryOptions {
        bytes: count * size,
        block_bytes: size,
        ttl_ns: None,
    })?;
    let disk = |name: &str, sync, dirty_bytes, count: usize| {
        let disk = DiskOptions {
            sync,
            dirty_bytes,
            ..DiskOptions::new(&folder.join(name), (count * (size + 4096)) as u64)
        };
        DiskTier::open(clock::now(), clock::unix_ns(), disk)
    };
    let cases: [(&str, Arc<dyn Tier>, f64); 3] = [
        ("host memory", memory, 20.0),
        ("disk, synced", disk("synced", true, u64::MAX, count)?, 1.0),
        (
            "disk, not synced",
            disk("plain", false, u64::MAX, count)?,
            2.0,
        ),
    ];
    for (name, tier, turns) in cases {
        let (mut put, mut got) = (Duration::ZERO, Duration::ZERO);
        let turns = floor_u64(turns * options.scale).max(1);
        for turn in 0..turns {
            for n in 0..count as u64 {
                let n = turn * count as u64 + n;
                block[..8].copy_from_slice(&n.to_le_bytes());
                let start = Instant::now();
                tier.put(clock::now(), &key(size, n), &block)?;
                put += start.elapsed();
            }
            for n in 0..count as u64 {
                let n = turn * count as u64 + n;
                let start = Instant::now();
                let hit = tier.get(clock::now(), &key(size, n), &mut block)?;
                got += start.elapsed();
                if !hit || block[..8] != n.to_le_bytes() {
                    return Err(MeasureError::Wrong(format!("{name}: block {n} is missing")));
                }
            }
        }
        let bytes = (to_usize(turns) * count * size) as f64;
        for (what, time) in [("put", put), ("get", got)] {
            let rate = bytes / time.as_secs_f64() / 1e9;
            rows.push(Row::new(
                "tier",
                format!("{name}, {what} 1 MiB, with checksum"),
                rate,
                "GB/s",
            ));
        }
    }
    rows.extend(writers(options, folder)?);
    let start = Instant::now();
    let turns = 200;
    let sum = (0..turns).fold(0, |sum, _| sum ^ checksum(std::hint::black_box(&block)));
    std::hint::black_box(sum);
    let rate = (turns * size) as f64 / start.elapsed().as_secs_f64() / 1e9;
    rows.push(Row::new("tier", "checksum of 1 MiB", rate, "GB/s"));
    Ok(rows)
}

/// Measures several writers with a bound on unsynced bytes, as in a store.
fn writers(options: &Options, folder: &Path) -> Result<Vec<Row>, MeasureError> {
    const WRITERS: u64 = 4;
    const DIRTY_BYTES: u64 = 1 << 30;
    let mut rows = Vec::new();
    for (size, target) in [(64 << 10, 1.0), (1 << 20, 1.5)] {
        // Less than the bound, so that writers do not wait for the disk.
        let bytes = floor_u64(options.scale * 4e8).clamp(4 << 20, DIRTY_BYTES / 2);
        let count = bytes / size as u64 / WRITERS;
        let path = folder.join(format!("writers-{size}"));
        let tier = DiskTier::open(
            clock::now(),
            clock::unix_ns(),
            DiskOptions {
                dirty_bytes: DIRTY_BYTES,
                ..DiskOptions::new(&path, 4 * bytes)
            },
        )?;
        let write = &|writer: u64| {
            let mut block = vec![0; size];
            for n in writer * count..(writer + 1) * count {
                block[..8].copy_from_slice(&n.to_le_bytes());
                tier.put(clock::now(), &key(size, n), &block)?;
            }
            Ok::<_, TierError>(())
        };
        let (start, cpu) = (Instant::now(), process_cpu_s());
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..WRITERS)
                .map(|writer| scope.spawn(move || write(writer)))
                .collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().expect("a writer does not panic"))
        })?;
        let written = (WRITERS * count * size as u64) as f64;
        let (wall, cpu) = (start.elapsed().as_secs_f64(), process_cpu_s() - cpu);
        let mut block = vec![0; size];
        for n in 0..WRITERS * count {
            if !tier.get(clock::now(), &key(size, n), &mut block)? || block[..8] != n.to_le_bytes()
            {
                return Err(MeasureError::Wrong(format!("block {n} is missing")));
            }
        }
        let what = format!("disk, {WRITERS} writers, put {} KiB", size >> 10);
        rows.push(Row::new("tier", what.clone(), written / wall / 1e9, "GB/s").target(target));
        rows.push(Row::new(
            "tier",
            format!("{what}, per CPU second"),
            written / cpu / 1e9,
            "GB/s",
        ));
        drop(tier);
        std::fs::remove_dir_all(&path)?;
    }
    Ok(rows)
}

fn cpu_us() -> f64 {
    seconds(ClockId::ThreadCPUTime) * 1e6
}

/// CPU time of another process so far, µs, from the kernel's accounting of its threads
/// (`Documentation/scheduler/sched-stats.rst`).
fn cpu_of_us(process: u32) -> Result<f64, MeasureError> {
    let mut ns = 0;
    for thread in std::fs::read_dir(format!("/proc/{process}/task"))? {
        // A thread may end before its file is read.
        let stat = std::fs::read_to_string(thread?.path().join("schedstat")).unwrap_or_default();
        let first = stat.split_whitespace().next().unwrap_or_default();
        ns += first.parse::<u64>().unwrap_or(0);
    }
    Ok(ns as f64 / 1e3)
}

fn process_cpu_s() -> f64 {
    seconds(ClockId::ProcessCPUTime)
}

fn wall_s() -> f64 {
    seconds(ClockId::Monotonic)
}

fn seconds(clock: ClockId) -> f64 {
    let now = clock_gettime(clock);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

/// Measures sets of keys and the index of peers, in CPU time.
///
/// # Errors
///
/// [`MeasureError`] if a message is refused, which would be a bug.
pub(crate) fn keys(options: &Options) -> Result<Vec<Row>, MeasureError> {
    let wrong = |error: slipstream_kvindex::KeyError| MeasureError::Wrong(error.to_string());
    let mut rows = Vec::new();
    let steps = floor_u64(400.0 * options.scale).max(20);
    let mut line = Vec::new();
    for held in [2_048u64, 1 << 14, 1 << 16, 1 << 18] {
        let mut set = KeySet::new(to_usize(held) + 1_024, 1);
        let key = |n: u64| key(7, n);
        for n in 0..held {
            set.change(&key(n), Change::Add(to_u32(n))).map_err(wrong)?;
        }
        set.set_consumed(true);
        let mut message = Vec::new();
        while set.message_into(CHUNK, &mut message) {
            message.clear();
        }
        // Removes the oldest keys and inserts others, as a full pool does.
        let mut churn = Vec::new();
        let mut decode = Vec::new();
        let (mut first, mut end) = (0, held);
        for _ in 0..steps {
            for (count, times) in [(512, &mut churn), (2, &mut decode)] {
                let out: Vec<_> = (first..first + count).map(key).collect();
                let into: Vec<_> = (end..end + count).map(key).collect();
                let start = cpu_us();
                for (at, (out, into)) in out.iter().zip(&into).enumerate() {
                    let block = to_u32((first + at as u64) % held);
                    set.change(out, Change::Remove(block)).map_err(wrong)?;
                    set.change(into, Change::Add(block)).map_err(wrong)?;
                }
                message.clear();
                set.message_into(CHUNK, &mut message);
                times.push(cpu_us() - start);
                (first, end) = (first + count, end + count);
            }
        }
        let churn = Row::time("keys", "", &mut churn).value;
        let row = Row::new(
            "keys",
            format!("512 inserted, 512 removed, {held} held"),
            1024.0 / churn,
            "M/s",
        );
        rows.push(row.target(5.0));
        let what = format!("a step with 2 inserted, 2 removed, {held} held");
        let row = Row::time("keys", what, &mut decode).target(6.0);
        line.push((held as f64 / 1e3, row.value));
        rows.push(row);
    }
    let slope = Row::new("keys", "increase per 1,000 keys held", slope(&line), "us");
    rows.push(slope.target(0.05));
    rows.append(&mut look_ups(steps).map_err(wrong)?);
    rows.append(&mut resyncs(steps / 10).map_err(wrong)?);
    Ok(rows)
}

/// Slope of a least-squares fit.
fn slope(points: &[(f64, f64)]) -> f64 {
    let n = points.len() as f64;
    let mean = |f: fn(&(f64, f64)) -> f64| points.iter().map(f).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let over: f64 = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum();
    let under: f64 = points.iter().map(|p| (p.0 - x).powi(2)).sum();
    over / under
}

fn look_ups(steps: u64) -> Result<Vec<Row>, slipstream_kvindex::KeyError> {
    const PEERS: usize = 64;
    const HELD: u64 = 1 << 13;
    let index = PeerIndex::new(PEERS, PEERS * to_usize(HELD), u64::MAX);
    // All peers hold one half of each peer's keys.
    let common: Vec<_> = (0..HELD / 2).map(|n| key(7, n)).collect();
    for peer in 0..PEERS {
        let mut set = KeySet::new(to_usize(HELD), 1);
        set.set_consumed(true);
        let own: Vec<_> = (0..HELD / 2).map(|n| key(100 + peer, n)).collect();
        for key in common.iter().chain(&own) {
            set.change(key, Change::Add(0))?;
        }
        while let Some(message) = set.message(CHUNK) {
            index.apply(SimTime(0), peer, &message)?;
        }
    }
    let mut times = Vec::new();
    let mut out = vec![0; PEERS];
    let mut digests: Vec<BlockHash> = Vec::new();
    for step in 0..20 * steps {
        let chain = &common[to_usize(step * 256 % (HELD / 2))..][..256];
        let start = cpu_us();
        digests.clear();
        digests.extend(chain.iter().map(|key| digest(key)));
        index.overlap(&digests, &mut out);
        times.push(cpu_us() - start);
        assert!(
            out.iter().all(|&hit| hit == 256),
            "every peer holds all keys"
        );
    }
    Ok(vec![
        Row::time("keys", "look-up of 256 blocks among 64 peers", &mut times).target(5.0),
    ])
}

fn resyncs(times: u64) -> Result<Vec<Row>, slipstream_kvindex::KeyError> {
    const HELD: u64 = 1 << 16;
    let mut set = KeySet::new(to_usize(HELD), 1);
    for n in 0..HELD {
        set.change(&key(7, n), Change::Add(to_u32(n)))?;
    }
    set.set_consumed(true);
    let index = PeerIndex::new(64, 64 << 16, u64::MAX);
    index.connect(SimTime(0), 0);
    let mut message = Vec::with_capacity(1 << 20);
    let mut slowest = [Vec::new(), Vec::new()];
    for _ in 0..times.max(10) {
        set.request_snapshot();
        let mut steps = [0.0f64; 2];
        loop {
            message.clear();
            let start = cpu_us();
            let more = set.message_into(CHUNK, &mut message);
            steps[0] = steps[0].max(cpu_us() - start);
            if !more {
                break;
            }
            let start = cpu_us();
            index.apply(SimTime(0), 0, &message)?;
            steps[1] = steps[1].max(cpu_us() - start);
        }
        while index.tick(SimTime(0), CHUNK) {}
        assert!(index.is_known(0), "the snapshot is complete");
        for (all, step) in slowest.iter_mut().zip(steps) {
            all.push(step);
        }
    }
    let rows = slowest
        .iter_mut()
        .zip(["sender", "receiver"])
        .map(|(steps, side)| {
            let what = format!("resync of 65,536 keys, slowest step of the {side}");
            let row = Row::time("keys", what, steps);
            // The target holds for every step, so it is compared with the slowest of all.
            let max = *steps.last().expect("ten at least");
            Row { value: max, ..row }.target(1_000.0)
        });
    Ok(rows.collect())
}
