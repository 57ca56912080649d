//! One mutex around the stream tables of all shards, to measure what sharing them would cost. Without
//! the feature `bench` there is none.

pub(crate) use imp::TableLock;

#[cfg(feature = "bench")]
mod imp {
    use std::sync::{Arc, Mutex, MutexGuard};

    use slipstream_base::sync::lock;

    /// Held while a stream table is touched, if it is there.
    #[derive(Clone, Default)]
    pub(crate) struct TableLock(Option<Arc<Mutex<()>>>);

    impl TableLock {
        pub(crate) fn new(locked: bool) -> TableLock {
            TableLock(locked.then(Arc::default))
        }

        pub(crate) fn hold(&self) -> Option<MutexGuard<'_, ()>> {
            self.0.as_deref().map(lock)
        }

        /// Takes it and gives it back.
        pub(crate) fn touch(&self) {
            drop(self.hold());
        }
    }
}

#[cfg(not(feature = "bench"))]
mod imp {
    /// Nothing.
    #[derive(Clone, Copy, Default)]
    pub(crate) struct TableLock;

    /// Nothing is held.
    pub(crate) struct Held;

    impl TableLock {
        #[inline]
        #[allow(clippy::unused_self)] // as the other one
        pub(crate) fn hold(self) -> Held {
            Held
        }

        #[inline]
        #[allow(clippy::unused_self)]
        pub(crate) fn touch(self) {}
    }
}
