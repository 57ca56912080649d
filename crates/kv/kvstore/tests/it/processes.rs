//! Transfers from a process that is stopped and killed.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use slipstream_kvstore::{
    Address, BlockEndpoint, BlockTransport, Completion, EndpointOptions, Fetch, FetchError,
    MemoryOptions, MemoryTier, PeerId, Profile, Region, Tier, TransportEvent, clock,
};

use crate::tiers::{BLOCK, block, child, key, role, say};

const LONG: Duration = Duration::from_secs(20);
const BLOCKS: u64 = 64;

/// Serves blocks until it is killed.
fn serve(folder: &std::path::Path) {
    let tier = MemoryTier::new(MemoryOptions {
        // Peers may pin half of the memory.
        bytes: 2 * BLOCKS as usize * BLOCK,
        block_bytes: BLOCK,
        ttl_ns: None,
    })
    .unwrap();
    for n in 0..BLOCKS {
        tier.put(clock::now(), &key(n), &block(n)).unwrap();
    }
    let server = BlockEndpoint::start(EndpointOptions {
        listen: vec![
            Address::Unix(folder.join("kv")),
            "tcp://127.0.0.1:0".parse().unwrap(),
        ],
        serves: Some(tier),
        ..EndpointOptions::new("server", Profile::default())
    })
    .unwrap();
    for address in server.addresses() {
        say(&format!("serving {address}"));
    }
    // Until it is killed, or its parent ends.
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
}

fn next(endpoint: &BlockEndpoint) -> TransportEvent {
    let until = Instant::now() + LONG;
    let mut events = Vec::new();
    while endpoint.poll(1, &mut events) == 0 {
        assert!(Instant::now() < until, "no event in time");
        std::thread::yield_now();
    }
    events.remove(0)
}

/// Fetches all blocks, and checks those that are reported as received.
fn fetch_all(endpoint: &BlockEndpoint, peer: PeerId, deadline: Duration) -> Completion {
    let region = Region::new(BLOCKS as usize * BLOCK);
    let keys: Vec<_> = (0..BLOCKS).map(key).collect();
    let blocks: Vec<_> = keys
        .iter()
        .enumerate()
        .map(|(n, key)| Fetch {
            key,
            at: n * BLOCK,
            len: BLOCK,
        })
        .collect();
    endpoint.fetch(peer, &region, &blocks, deadline).unwrap();
    let TransportEvent::Done(done) = next(endpoint) else {
        panic!("unexpected event before the end of the transfer")
    };
    check(&region, &done);
    done
}

fn check(region: &Arc<Region>, done: &Completion) {
    let mut out = vec![0; BLOCK];
    for n in 0..BLOCKS {
        if done.failed.iter().all(|failed| u64::from(failed.0) != n) {
            region.read(n as usize * BLOCK, &mut out).unwrap();
            assert!(out == block(n), "block {n}");
        }
    }
}

/// Killed at the end of the test, even if the test fails while the process is stopped.
struct Server(Child);

impl Server {
    fn pid(&self) -> Pid {
        Pid::from_raw(self.0.id() as i32).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_stopped_process_costs_deadlines_and_a_killed_one_its_connection() {
    if let Some(folder) = role("serve") {
        serve(&folder);
        return;
    }
    let name = "processes::a_stopped_process_costs_deadlines_and_a_killed_one_its_connection";
    for unix in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = child(name, "serve", folder.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut server = Server(command.spawn().unwrap());
        // The pipe stays open, as the other process would fail to write.
        let mut lines = BufReader::new(server.0.stdout.take().unwrap()).lines();
        let address = lines
            .by_ref()
            .map_while(Result::ok)
            .filter_map(|line| line.strip_prefix("serving ")?.parse().ok())
            .find(|address| matches!(address, Address::Unix(_)) == unix)
            .unwrap();
        let client =
            BlockEndpoint::start(EndpointOptions::new("client", Profile::default())).unwrap();
        let peer = client.connect(&address).unwrap();
        assert!(matches!(next(&client), TransportEvent::Up { .. }));
        assert!(fetch_all(&client, peer, LONG).failed.is_empty());
        server.signal(Signal::STOP);
        // All of its threads are stopped once this returns.
        let (_, status) = waitpid(Some(server.pid()), WaitOptions::UNTRACED)
            .unwrap()
            .unwrap();
        assert!(status.stopped());
        for _ in 0..3 {
            let done = fetch_all(&client, peer, Duration::from_millis(50));
            let why: Vec<_> = done.failed.iter().map(|failed| failed.1).collect();
            assert_eq!(why, [FetchError::Deadline; BLOCKS as usize]);
        }
        // It continues; its late answers are discarded.
        server.signal(Signal::CONT);
        assert!(fetch_all(&client, peer, LONG).failed.is_empty());
        server.signal(Signal::KILL);
        server.0.wait().unwrap();
        let TransportEvent::Down { why, refused, .. } = next(&client) else {
            panic!("unexpected event before the end of the connection")
        };
        assert!(!refused, "{why}");
        let done = fetch_all(&client, peer, LONG);
        assert_eq!(done.failed.len(), BLOCKS as usize);
        assert!(
            done.failed
                .iter()
                .all(|failed| failed.1 == FetchError::Lost)
        );
    }
}
