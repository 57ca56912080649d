//! Waiting: for a waker, and for changes of a folder where the system reports them (inotify).

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::Waker;

/// Names that are kept apart; beyond that the folder is listed.
const NAMES_MAX: usize = 1_024;

/// Changes of a folder that the system reported.
#[derive(Debug, Default)]
pub(crate) struct Reports {
    /// Files that were put, replaced or removed.
    pub(crate) names: BTreeSet<String>,
    /// Reports were lost, or the folder itself changed.
    pub(crate) is_incomplete: bool,
}

/// Waits for a waker.
#[derive(Debug)]
pub(crate) struct Wakes {
    woken: UnixStream,
    wakes: Arc<UnixStream>,
}

impl Wakes {
    pub(crate) fn new() -> io::Result<Wakes> {
        let (woken, wakes) = UnixStream::pair()?;
        woken.set_nonblocking(true)?;
        wakes.set_nonblocking(true)?;
        Ok(Wakes {
            woken,
            wakes: Arc::new(wakes),
        })
    }

    pub(crate) fn waker(&self) -> Waker {
        let wakes = Arc::clone(&self.wakes);
        Arc::new(move || {
            // A full socket has a wake-up in it already.
            let _ = (&*wakes).write(&[1]);
        })
    }

    /// Waits until the waker is called, `also` can be read, or the time is up.
    pub(crate) fn wait(&self, also: Option<BorrowedFd<'_>>, timeout: Duration) {
        let timeout = Timespec {
            tv_sec: timeout.as_secs().min(3_600).cast_signed(),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        let mut fds = vec![PollFd::new(&self.woken, PollFlags::IN)];
        fds.extend(also.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        // An interrupted wait is a short one.
        let _ = poll(&mut fds, Some(&timeout));
        while matches!((&self.woken).read(&mut [0; 64]), Ok(64)) {}
    }
}

/// Waits for a waker and a folder.
#[derive(Debug)]
pub(crate) struct Notify {
    wakes: Wakes,
    inotify: inotify::Inotify,
}

impl Notify {
    pub(crate) fn new() -> io::Result<Notify> {
        Ok(Notify {
            wakes: Wakes::new()?,
            inotify: inotify::Inotify::new(),
        })
    }

    pub(crate) fn waker(&self) -> Waker {
        self.wakes.waker()
    }

    /// Watches this folder and no other. `false`: the system does not report changes.
    pub(crate) fn watch(&mut self, folder: &Path) -> bool {
        self.inotify.watch(folder)
    }

    pub(crate) fn take(&mut self) -> Reports {
        let mut reports = Reports::default();
        self.inotify.take(&mut reports);
        reports
    }

    /// No more reports, as on a file system that makes none.
    #[cfg(test)]
    pub(crate) fn forget_inotify(&mut self) {
        self.inotify = inotify::Inotify::none();
    }

    /// Whether nothing was reported since [`Notify::take`].
    #[cfg(test)]
    pub(crate) fn is_quiet(&self) -> bool {
        let Some(fd) = self.inotify.fd() else {
            return true;
        };
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() == 0
    }

    pub(crate) fn wait(&mut self, timeout: Duration) {
        let inotify = self.inotify.fd().map(AsFd::as_fd);
        self.wakes.wait(inotify, timeout);
    }
}

#[cfg(target_os = "linux")]
mod inotify {
    use std::mem::MaybeUninit;
    use std::os::fd::OwnedFd;
    use std::path::Path;

    use rustix::fs::inotify::{
        CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init, remove_watch,
    };

    use super::{NAMES_MAX, Reports};

    #[derive(Debug)]
    pub(super) struct Inotify {
        /// `None`: the user has no more of them (`fs.inotify.max_user_instances`).
        fd: Option<OwnedFd>,
        watched: Option<i32>,
    }

    impl Inotify {
        pub(super) fn new() -> Inotify {
            Inotify {
                fd: init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok(),
                watched: None,
            }
        }

        #[cfg(test)]
        pub(super) fn none() -> Inotify {
            Inotify {
                fd: None,
                watched: None,
            }
        }

        pub(super) fn fd(&self) -> Option<&OwnedFd> {
            self.fd.as_ref()
        }

        pub(super) fn watch(&mut self, folder: &Path) -> bool {
            let Some(fd) = &self.fd else { return false };
            if let Some(old) = self.watched.take() {
                // It is gone already if its folder is.
                let _ = remove_watch(fd, old);
            }
            // Not ATTRIB: each renewal is one, of each process, and would wake all others.
            let flags = WatchFlags::CLOSE_WRITE
                | WatchFlags::MOVED_TO
                | WatchFlags::MOVED_FROM
                | WatchFlags::DELETE
                | WatchFlags::DELETE_SELF
                | WatchFlags::MOVE_SELF
                | WatchFlags::ONLYDIR;
            self.watched = add_watch(fd, folder, flags).ok();
            self.watched.is_some()
        }

        pub(super) fn take(&mut self, reports: &mut Reports) {
            let Some(fd) = &self.fd else { return };
            let mut buffer = [MaybeUninit::uninit(); 4_096];
            let mut reader = Reader::new(fd, &mut buffer);
            while let Ok(event) = reader.next() {
                let flags = event.events();
                let of_folder = ReadFlags::DELETE_SELF
                    | ReadFlags::MOVE_SELF
                    | ReadFlags::QUEUE_OVERFLOW
                    | ReadFlags::UNMOUNT;
                if flags.intersects(of_folder) {
                    reports.is_incomplete = true;
                }
                let name = event.file_name().and_then(|name| name.to_str().ok());
                if let Some(name) = name {
                    if reports.names.len() == NAMES_MAX {
                        reports.is_incomplete = true;
                    } else {
                        reports.names.insert(name.to_owned());
                    }
                }
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod inotify {
    use std::os::fd::OwnedFd;
    use std::path::Path;

    use super::Reports;

    /// Other systems have other means; there the folder is polled.
    #[derive(Debug)]
    pub(super) struct Inotify;

    #[allow(clippy::unused_self)]
    impl Inotify {
        pub(super) fn new() -> Inotify {
            Inotify
        }

        #[cfg(test)]
        pub(super) fn none() -> Inotify {
            Inotify
        }

        pub(super) fn fd(&self) -> Option<&OwnedFd> {
            None
        }

        pub(super) fn watch(&mut self, _folder: &Path) -> bool {
            false
        }

        pub(super) fn take(&mut self, _reports: &mut Reports) {}
    }
}
