//! Transfers from a process that is stopped and killed.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use slipstream_kvstore::{
    Address, Completion, Endpoint, EndpointOptions, Event, Fetch, FetchError, MemoryOptions,
    MemoryTier, PeerId, Profile, Region, Tier, Transport, clock,
};

use crate::tiers::{BLOCK, block, child, key, role, say};

const LONG: Duration = Duration::from_secs(20);
const BLOCKS: u64 = 64;

/// Holds blocks and gives them away until it is killed.
fn serve(folder: &std::path::Path) {
    let tier = MemoryTier::new(MemoryOptions {
        // Peers may pin half of them.
        bytes: 2 * BLOCKS as usize * BLOCK,
        block_bytes: BLOCK,
        ttl_ns: None,
    })
    .unwrap();
    for n in 0..BLOCKS {
        tier.put(clock::now(), &key(n), &block(n)).unwrap();
    }
    let server = Endpoint::start(EndpointOptions {
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
    // Until it is killed, or its parent is gone.
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
}

fn next(endpoint: &Endpoint) -> Event {
    let until = Instant::now() + LONG;
    let mut events = Vec::new();
    while endpoint.poll(1, &mut events) == 0 {
        assert!(Instant::now() < until, "nothing came");
        std::thread::yield_now();
    }
    events.remove(0)
}

/// Fetches all blocks; checks that those that are said to be there are.
fn fetch_all(endpoint: &Endpoint, peer: PeerId, deadline: Duration) -> Completion {
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
    let Event::Done(done) = next(endpoint) else {
        panic!("the transfer ends before anything else happens")
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

/// Ends with the test, also where that fails while it is stopped.
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
fn a_process_that_is_stopped_costs_deadlines_and_one_that_is_killed_its_connection() {
    if let Some(folder) = role("serve") {
        serve(&folder);
        return;
    }
    let name = "processes::a_process_that_is_stopped_costs_deadlines_and_one_that_is_killed_its_connection";
    for unix in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = child(name, "serve", folder.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut server = Server(command.spawn().unwrap());
        // The pipe stays open, as the other process would mind.
        let mut lines = BufReader::new(server.0.stdout.take().unwrap()).lines();
        let address = lines
            .by_ref()
            .map_while(Result::ok)
            .filter_map(|line| line.strip_prefix("serving ")?.parse().ok())
            .find(|address| matches!(address, Address::Unix(_)) == unix)
            .unwrap();
        let client = Endpoint::start(EndpointOptions::new("client", Profile::default())).unwrap();
        let peer = client.connect(&address).unwrap();
        assert!(matches!(next(&client), Event::Up { .. }));
        assert!(fetch_all(&client, peer, LONG).failed.is_empty());
        server.signal(Signal::STOP);
        // All of its threads stand still once this returns.
        let (_, status) = waitpid(Some(server.pid()), WaitOptions::UNTRACED)
            .unwrap()
            .unwrap();
        assert!(status.stopped());
        for _ in 0..3 {
            let done = fetch_all(&client, peer, Duration::from_millis(50));
            let why: Vec<_> = done.failed.iter().map(|failed| failed.1).collect();
            assert_eq!(why, [FetchError::Deadline; BLOCKS as usize]);
        }
        // It goes on as if nothing had been; what it answers late goes nowhere.
        server.signal(Signal::CONT);
        assert!(fetch_all(&client, peer, LONG).failed.is_empty());
        server.signal(Signal::KILL);
        server.0.wait().unwrap();
        let Event::Down { why, refused, .. } = next(&client) else {
            panic!("the connection ends")
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
