//! Finished responses, which later requests of the Responses API continue.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};

use bytes::Bytes;
use slipstream_base::sync::lock;
use slipstream_base::width::to_usize;

use crate::door::budget::Charge;

/// Responses that are stored at most.
const STORED_MAX: usize = 1024;

/// Bytes of all stored responses, and of one, at most. All take an eighth of `live.memory_max` at most, so that
/// they never fill a client's share.
const STORED_BYTES_MAX: usize = 32 << 20;
const RESPONSE_BYTES_MAX: usize = 2 << 20;

/// Finished responses by id, which later requests continue. All shards share it; requests that neither store
/// nor continue one do not touch it.
pub(crate) struct ResponseStore {
    stored: Mutex<Stored>,
    /// Bytes of all stored responses, at most.
    bytes_max: usize,
}

#[derive(Default)]
struct Stored {
    /// In order of arrival.
    entries: VecDeque<StoredResponse>,
    bytes: usize,
}

/// A finished response.
pub(crate) struct StoredResponse {
    pub(crate) id: String,
    /// Whose it is.
    pub(crate) owner: usize,
    pub(crate) body: Bytes,
    /// The conversation up to its end.
    pub(crate) history: Bytes,
    #[allow(dead_code)] // given back when dropped
    pub(crate) memory: Charge,
}

impl StoredResponse {
    fn bytes(&self) -> usize {
        self.body.len() + self.history.len()
    }
}

impl ResponseStore {
    /// For a server that has `memory` bytes for its clients.
    pub(crate) fn new(memory: u64) -> ResponseStore {
        ResponseStore {
            stored: Mutex::default(),
            bytes_max: to_usize(memory / 8).min(STORED_BYTES_MAX),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Stored> {
        lock(&self.stored)
    }

    /// Body and history of response `id` of `owner`.
    pub(crate) fn get(&self, owner: usize, id: &str) -> Option<(Bytes, Bytes)> {
        let stored = self.lock();
        let entry = stored
            .entries
            .iter()
            .find(|e| e.owner == owner && e.id == id)?;
        Some((entry.body.clone(), entry.history.clone()))
    }

    pub(crate) fn remove(&self, owner: usize, id: &str) -> bool {
        let mut stored = self.lock();
        let at = stored
            .entries
            .iter()
            .position(|e| e.owner == owner && e.id == id);
        at.and_then(|at| stored.take(at)).is_some()
    }

    /// Bytes of a response that is stored, at most.
    pub(crate) fn response_bytes_max(&self) -> usize {
        self.bytes_max.min(RESPONSE_BYTES_MAX)
    }

    /// Stores a response of [`response_bytes_max`](Self::response_bytes_max) bytes at most. Returns how many others
    /// made room for it.
    pub(crate) fn put(&self, entry: StoredResponse) -> u64 {
        let mut stored = self.lock();
        let same = stored
            .entries
            .iter()
            .position(|e| e.owner == entry.owner && e.id == entry.id);
        if let Some(at) = same {
            stored.take(at);
        }
        let mut evicted = 0;
        while stored.entries.len() >= STORED_MAX || stored.bytes + entry.bytes() > self.bytes_max {
            // A client that holds half of the store makes room itself.
            let own = stored.entries.iter().filter(|e| e.owner == entry.owner);
            let (count, bytes) = own.fold((0, 0), |(n, b), e| (n + 1, b + e.bytes()));
            let greedy = count >= STORED_MAX / 2 || bytes >= self.bytes_max / 2;
            let at = stored
                .entries
                .iter()
                .position(|e| !greedy || e.owner == entry.owner);
            stored.take(at.unwrap_or(0));
            evicted += 1;
        }
        stored.bytes += entry.bytes();
        stored.entries.push_back(entry);
        evicted
    }
}

impl Stored {
    fn take(&mut self, at: usize) -> Option<StoredResponse> {
        let entry = self.entries.remove(at)?;
        self.bytes -= entry.bytes();
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::door::budget::{ClientUse, Memory};

    fn entry(memory: &Arc<Memory>, owner: usize, id: usize, bytes: usize) -> StoredResponse {
        let client: Arc<ClientUse> = Arc::default();
        StoredResponse {
            id: id.to_string(),
            owner,
            body: vec![0; bytes].into(),
            history: Bytes::new(),
            memory: memory.charge(&client, bytes as u64).unwrap(),
        }
    }

    #[test]
    fn the_store_is_bounded_and_a_greedy_client_evicts_its_own() {
        let memory = Memory::new(1 << 30);
        let store = ResponseStore::new(memory.max());
        assert_eq!(store.put(entry(&memory, 1, 0, 10)), 0);
        let mut evicted = 0;
        for id in 0..2 * STORED_MAX {
            evicted += store.put(entry(&memory, 2, id, 10));
        }
        assert_eq!(store.lock().entries.len(), STORED_MAX);
        assert_eq!(evicted as usize, STORED_MAX + 1);
        assert!(store.get(1, "0").is_some(), "the other client's stays");
        assert!(store.get(2, "0").is_none(), "its own oldest went");
        assert!(store.get(1, "2047").is_none(), "not seen by another client");
        for id in 0..64 {
            store.put(entry(&memory, 3, id, RESPONSE_BYTES_MAX));
        }
        let held = store
            .lock()
            .entries
            .iter()
            .map(StoredResponse::bytes)
            .sum::<usize>();
        assert_eq!(held, store.lock().bytes);
        assert!(held <= STORED_BYTES_MAX);
        assert_eq!(memory.used(), held as u64, "memory is given back");
        assert!(store.remove(3, "63") && !store.remove(3, "63"));
        // A name that is sent twice counts as its last response.
        store.put(entry(&memory, 3, 62, 7));
        assert_eq!(store.get(3, "62").unwrap().0.len(), 7);
        drop(store);
        assert_eq!(memory.used(), 0);
    }
}
