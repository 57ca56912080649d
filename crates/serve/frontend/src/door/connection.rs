//! A client's connection: its requests under way, and whether its client reads their answers.

use std::cell::{Cell, RefCell, RefMut};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use slipstream_planes::clock::monotonic_ns;

use crate::door::account::Account;
use crate::door::budget::{Charge, ClientUse, Memory, RequestUse};
use crate::door::limits::Limits;
use crate::door::rates::KeyUse;
use crate::door::socket::Wire;
use crate::openai::ApiError;

/// A connection as its requests see it.
pub(crate) struct Connection {
    /// The client by its address.
    client: Arc<ClientUse>,
    /// Streams of its requests.
    streams: Cell<u64>,
    /// Requests whose answer is not yet sent.
    open: Cell<u32>,
    /// Those of them whose whole answer waits for the client to read it.
    unread: Cell<u32>,
    /// When a request last began, was answered or ended, ns.
    progress_ns: Cell<u64>,
    /// A request has come.
    served: Cell<bool>,
    /// Its socket, if the connection is served.
    wire: Wire,
}

/// Why a connection ends that its client leaves open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expired {
    /// It has no request.
    Idle,
    /// Its client reads none of its answers.
    Unread,
}

impl Connection {
    pub(crate) fn new(client: Arc<ClientUse>) -> Rc<Connection> {
        Rc::new(Connection {
            client,
            streams: Cell::new(0),
            open: Cell::new(0),
            unread: Cell::new(0),
            progress_ns: Cell::new(monotonic_ns()),
            served: Cell::new(false),
            wire: Wire::default(),
        })
    }

    /// Its socket.
    pub(crate) fn wire(&self) -> &Wire {
        &self.wire
    }

    /// Since when the connection has had no request after its last one, ns; `None`: it has one, had none yet, or its
    /// last answer is not written.
    pub(crate) fn idle_since(&self) -> Option<u64> {
        let is_idle = self.served.get() && self.open.get() == 0 && self.wire.is_flushed();
        is_idle.then(|| self.progress_ns.get())
    }

    /// A request has begun, at `now_ns`.
    pub(crate) fn begin(self: &Rc<Self>, now_ns: u64) -> Rc<Owner> {
        self.open.set(self.open.get() + 1);
        self.progress_ns.set(now_ns);
        self.served.set(true);
        Rc::new(Owner {
            connection: self.clone(),
            unread: Cell::new(false),
            account: RefCell::default(),
            memory: Arc::default(),
        })
    }

    /// Waits until the connection has been idle, or unread, for longer than it may.
    pub(crate) async fn expired(&self, limits: &Limits) -> Expired {
        loop {
            let (kind, most) = if self.open.get() == 0 {
                // As for HTTP/1, where the first head is due that soon.
                let first = limits.read_timeout.min(limits.idle_timeout);
                let most = if self.served.get() {
                    limits.idle_timeout
                } else {
                    first
                };
                (Expired::Idle, most)
            } else {
                (Expired::Unread, limits.write_timeout)
            };
            let since = Duration::from_nanos(monotonic_ns().saturating_sub(self.progress_ns.get()));
            let stands = kind == Expired::Idle || self.unread.get() == self.open.get();
            if stands && since >= most {
                return kind;
            }
            // A stream that stalls between two checks is found late by a fourth of its time at most.
            let left = most.saturating_sub(since).max(most / 4);
            tokio::time::sleep(left.max(Duration::from_millis(1)).min(most)).await;
        }
    }

    /// Waits until the connection has had no request for `time` from now on. At once if `time` is 0: a request
    /// that has begun does not count then.
    pub(crate) async fn idle_for(&self, time: Duration) {
        if time.is_zero() {
            return;
        }
        let called_ns = monotonic_ns();
        loop {
            let since_ns = self.progress_ns.get().max(called_ns);
            let since = Duration::from_nanos(monotonic_ns().saturating_sub(since_ns));
            let mut left = time.saturating_sub(since);
            if self.open.get() > 0 {
                left = time;
            } else if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.max(Duration::from_millis(1))).await;
        }
    }
}

/// Whose request it is: an API key's, or an address's if there are no keys.
#[derive(Clone)]
pub(crate) struct Client {
    owner: Rc<Owner>,
    counts: Arc<ClientUse>,
}

impl Client {
    pub(crate) fn new(owner: Rc<Owner>, key: Option<Arc<ClientUse>>) -> Client {
        if let Some(key) = key.as_ref().and_then(|key| key.key.as_ref()) {
            owner.account().note_key(key);
        }
        let counts = key.unwrap_or_else(|| owner.connection.client.clone());
        Client { owner, counts }
    }

    /// Resources that the client holds.
    pub(crate) fn counts(&self) -> &Arc<ClientUse> {
        &self.counts
    }

    /// Charges `bytes` of `memory` to the client, for its request.
    ///
    /// # Errors
    /// As [`Charge::grow_to`].
    pub(crate) fn charge(&self, memory: &Arc<Memory>, bytes: u64) -> Result<Charge, ApiError> {
        memory.charge_for(&self.counts, Some(&self.owner.memory), bytes)
    }

    /// The request.
    pub(crate) fn owner(&self) -> &Rc<Owner> {
        &self.owner
    }

    /// A request that costs something has come.
    ///
    /// # Errors
    /// 429: it is one too many for its key.
    pub(crate) fn admit(&self) -> Result<(), ApiError> {
        self.counts.key.as_ref().map_or(Ok(()), KeyUse::admit)
    }

    /// The request may use up to `tokens`. They are charged to its key until it ends, and then those that it used.
    ///
    /// # Errors
    /// 429: earlier ones have used up the rate of its key.
    pub(crate) fn charge_tokens(&self, tokens: u64) -> Result<(), ApiError> {
        let key = self.counts.key.as_ref();
        if let Some(key) = key.filter(|key| key.limits_tokens()) {
            let taken_ns = key.charge(tokens)?;
            self.owner
                .account()
                .note_charge(self.counts.clone(), taken_ns);
        }
        Ok(())
    }

    /// Streams of its connection.
    pub(crate) fn streams_of_connection(&self) -> u64 {
        self.owner.connection.streams.get()
    }

    pub(crate) fn add_streams(&self, count: u64) {
        let streams = &self.owner.connection.streams;
        streams.set(streams.get() + count);
    }

    pub(crate) fn remove_streams(&self, count: u64) {
        let streams = &self.owner.connection.streams;
        streams.set(streams.get() - count);
    }

    /// As [`Owner::answered`].
    pub(crate) fn answered(&self) {
        self.owner.answered();
    }
}

/// A request of a connection. Dropped when its answer is sent, or will not be.
pub(crate) struct Owner {
    connection: Rc<Connection>,
    unread: Cell<bool>,
    account: RefCell<Account>,
    /// Memory of its charges.
    memory: Arc<RequestUse>,
}

impl Owner {
    /// The client has read some of the answer.
    pub(crate) fn progress(&self) {
        self.connection.progress_ns.set(monotonic_ns());
    }

    /// The socket of its connection.
    pub(crate) fn wire(&self) -> &Wire {
        &self.connection.wire
    }

    /// The account of the request.
    pub(crate) fn account(&self) -> RefMut<'_, Account> {
        self.account.borrow_mut()
    }

    /// Nothing more is added to the answer: only the client can end the request.
    pub(crate) fn answered(&self) {
        if !self.unread.replace(true) {
            let connection = &self.connection;
            connection.unread.set(connection.unread.get() + 1);
            connection.progress_ns.set(monotonic_ns());
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let connection = &self.connection;
        if self.unread.get() {
            connection.unread.set(connection.unread.get() - 1);
        }
        connection.open.set(connection.open.get() - 1);
        connection.progress_ns.set(monotonic_ns());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_expires_when_idle_or_when_no_answer_is_read() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let limits = Limits {
            read_timeout: Duration::from_millis(20),
            idle_timeout: Duration::from_millis(20),
            write_timeout: Duration::from_millis(20),
            ..Limits::default()
        };
        runtime.block_on(async {
            let connection = Connection::new(Arc::default());
            assert_eq!(connection.expired(&limits).await, Expired::Idle);
            let waits = connection.begin(monotonic_ns());
            let read = connection.begin(monotonic_ns());
            read.answered();
            let expired =
                tokio::time::timeout(4 * limits.write_timeout, connection.expired(&limits));
            assert!(expired.await.is_err(), "one request waits for an engine");
            waits.answered();
            waits.answered();
            assert_eq!(connection.unread.get(), 2);
            assert_eq!(connection.expired(&limits).await, Expired::Unread);
            drop((waits, read));
            assert_eq!((connection.open.get(), connection.unread.get()), (0, 0));
        });
    }
}
