//! Ways for one thread to wake another; each message is stamped with its time and CPU.

use std::collections::VecDeque;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::thread::futex;
use slipstream_base::sync::lock;
pub use slipstream_cpusched::machine::Mechanism;

/// Messages that an eventfd or futex link holds; a full link returns an error to the sender.
const QUEUE_MAX: usize = 4096;

/// Time and CPU at which a message was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// `CLOCK_MONOTONIC`, ns; the value of [`Stamp::STOP`] ends the receiver.
    pub at_ns: u64,
    /// The request's due time, ns; set by the sender.
    pub due_ns: u64,
    /// The sender's CPU.
    pub cpu: u32,
}

impl Stamp {
    /// Ends the receiver.
    pub const STOP: Stamp = Stamp {
        at_ns: u64::MAX,
        due_ns: 0,
        cpu: 0,
    };

    /// A stamp with the current time and CPU.
    pub fn here() -> Stamp {
        let at_ns = now_ns();
        Stamp {
            at_ns,
            due_ns: at_ns,
            cpu: cpu(),
        }
    }

    fn to_bytes(self) -> [u8; 20] {
        let mut b = [0; 20];
        b[..8].copy_from_slice(&self.at_ns.to_ne_bytes());
        b[8..16].copy_from_slice(&self.due_ns.to_ne_bytes());
        b[16..].copy_from_slice(&self.cpu.to_ne_bytes());
        b
    }

    fn from_bytes(b: [u8; 20]) -> Stamp {
        let (at, rest) = b.split_at(8);
        let (due, cpu) = rest.split_at(8);
        Stamp {
            at_ns: u64::from_ne_bytes(at.try_into().expect("eight bytes")),
            due_ns: u64::from_ne_bytes(due.try_into().expect("eight bytes")),
            cpu: u32::from_ne_bytes(cpu.try_into().expect("four bytes")),
        }
    }
}

/// `CLOCK_MONOTONIC`, ns.
pub fn now_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec.cast_unsigned() * 1_000_000_000 + t.tv_nsec.cast_unsigned()
}

/// The CPU that runs this thread.
pub fn cpu() -> u32 {
    u32::try_from(rustix::thread::sched_getcpu()).unwrap_or(u32::MAX)
}

#[derive(Debug, Default)]
struct Queue {
    stamps: Mutex<VecDeque<Stamp>>,
    /// Counts messages; the futex.
    sent: AtomicU32,
}

impl Queue {
    fn push(&self, s: Stamp) -> io::Result<()> {
        let mut q = lock(&self.stamps);
        if q.len() >= QUEUE_MAX && s != Stamp::STOP {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        q.push_back(s);
        Ok(())
    }

    fn pop(&self) -> Option<Stamp> {
        lock(&self.stamps).pop_front()
    }
}

/// The waking end.
#[derive(Debug)]
pub struct Sender(Tx);

#[derive(Debug)]
enum Tx {
    Pipe(PipeWriter),
    Unix(UnixStream),
    Tcp(TcpStream),
    Eventfd(OwnedFd, Arc<Queue>),
    Futex(Arc<Queue>),
}

/// The woken end.
#[derive(Debug)]
pub struct Receiver(Rx);

#[derive(Debug)]
enum Rx {
    Pipe(PipeReader),
    Unix(UnixStream),
    Tcp(TcpStream),
    Epoll(TcpStream, OwnedFd),
    Eventfd(OwnedFd, Arc<Queue>),
    Futex(Arc<Queue>),
}

/// Creates a link.
///
/// # Errors
/// If the kernel has no free descriptor or loopback port.
pub fn link(m: Mechanism) -> io::Result<(Sender, Receiver)> {
    let tcp = || {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let tx = TcpStream::connect(listener.local_addr()?)?;
        tx.set_nodelay(true)?;
        Ok::<_, io::Error>((tx, listener.accept()?.0))
    };
    Ok(match m {
        Mechanism::Pipe => {
            let (rx, tx) = io::pipe()?;
            (Sender(Tx::Pipe(tx)), Receiver(Rx::Pipe(rx)))
        }
        Mechanism::Unix => {
            let (tx, rx) = UnixStream::pair()?;
            (Sender(Tx::Unix(tx)), Receiver(Rx::Unix(rx)))
        }
        Mechanism::Tcp => {
            let (tx, rx) = tcp()?;
            (Sender(Tx::Tcp(tx)), Receiver(Rx::Tcp(rx)))
        }
        Mechanism::Epoll => {
            let (tx, rx) = tcp()?;
            let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            epoll::add(
                &poll,
                &rx,
                epoll::EventData::new_u64(0),
                epoll::EventFlags::IN,
            )?;
            (Sender(Tx::Tcp(tx)), Receiver(Rx::Epoll(rx, poll)))
        }
        Mechanism::Eventfd => {
            let tx = eventfd(0, EventfdFlags::CLOEXEC)?;
            let (rx, q) = (tx.try_clone()?, Arc::new(Queue::default()));
            (
                Sender(Tx::Eventfd(tx, q.clone())),
                Receiver(Rx::Eventfd(rx, q)),
            )
        }
        Mechanism::Futex => {
            let q = Arc::new(Queue::default());
            (Sender(Tx::Futex(q.clone())), Receiver(Rx::Futex(q)))
        }
    })
}

impl Sender {
    /// Sends a stamp and wakes the receiver if it waits.
    ///
    /// # Errors
    /// `WouldBlock` if the queue of an eventfd or futex link is full (the message is not sent);
    /// otherwise the kernel's error.
    pub fn send(&mut self, s: Stamp) -> io::Result<()> {
        match &mut self.0 {
            Tx::Pipe(tx) => tx.write_all(&s.to_bytes()),
            Tx::Unix(tx) => tx.write_all(&s.to_bytes()),
            Tx::Tcp(tx) => tx.write_all(&s.to_bytes()),
            Tx::Eventfd(tx, q) => {
                q.push(s)?;
                rustix::io::write(tx, &1u64.to_ne_bytes())?;
                Ok(())
            }
            Tx::Futex(q) => {
                q.push(s)?;
                q.sent.fetch_add(1, Ordering::Release);
                futex::wake(&q.sent, futex::Flags::PRIVATE, 1)?;
                Ok(())
            }
        }
    }
}

impl Receiver {
    /// Waits for a stamp.
    ///
    /// # Errors
    /// If the sender has disconnected, or the kernel's error.
    pub fn recv(&mut self) -> io::Result<Stamp> {
        let mut bytes = [0; 20];
        match &mut self.0 {
            Rx::Pipe(rx) => rx.read_exact(&mut bytes)?,
            Rx::Unix(rx) => rx.read_exact(&mut bytes)?,
            Rx::Tcp(rx) => rx.read_exact(&mut bytes)?,
            Rx::Epoll(rx, poll) => {
                let mut events = Vec::with_capacity(1);
                loop {
                    match epoll::wait(&*poll, rustix::buffer::spare_capacity(&mut events), None) {
                        Ok(n) if n > 0 => break,
                        Ok(_) | Err(rustix::io::Errno::INTR) => {}
                        Err(e) => return Err(e.into()),
                    }
                }
                rx.read_exact(&mut bytes)?;
            }
            Rx::Eventfd(rx, q) => loop {
                if let Some(s) = q.pop() {
                    return Ok(s);
                }
                match rustix::io::read(&*rx, &mut bytes[..8]) {
                    Ok(_) | Err(rustix::io::Errno::INTR) => {}
                    Err(e) => return Err(e.into()),
                }
            },
            Rx::Futex(q) => loop {
                let seen = q.sent.load(Ordering::Acquire);
                if let Some(s) = q.pop() {
                    return Ok(s);
                }
                // EAGAIN: a message arrived in between; EINTR: a signal. Both retry.
                match futex::wait(&q.sent, futex::Flags::PRIVATE, seen, None) {
                    Ok(()) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                    Err(e) => return Err(e.into()),
                }
            },
        }
        Ok(Stamp::from_bytes(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mechanism_carries_stamps_in_order_and_wakes() {
        for m in Mechanism::ALL {
            let (mut tx, mut rx) = link(m).unwrap();
            let reader = std::thread::spawn(move || {
                let mut seen = Vec::new();
                loop {
                    let s = rx.recv().unwrap();
                    if s == Stamp::STOP {
                        return seen;
                    }
                    seen.push(s.due_ns);
                }
            });
            for due_ns in 0..100 {
                tx.send(Stamp {
                    at_ns: 1,
                    due_ns,
                    cpu: 7,
                })
                .unwrap();
            }
            tx.send(Stamp::STOP).unwrap();
            assert_eq!(
                reader.join().unwrap(),
                (0..100).collect::<Vec<_>>(),
                "{}",
                m.name()
            );
            assert_eq!(Mechanism::parse(m.name()), Some(m));
        }
    }

    #[test]
    fn full_queue_refuses_but_can_be_stopped() {
        let (mut tx, mut rx) = link(Mechanism::Futex).unwrap();
        for _ in 0..QUEUE_MAX {
            tx.send(Stamp::here()).unwrap();
        }
        let full = tx.send(Stamp::here()).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        tx.send(Stamp::STOP).unwrap();
        assert_ne!(rx.recv().unwrap(), Stamp::STOP);
    }
}
