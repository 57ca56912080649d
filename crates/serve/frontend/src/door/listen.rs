//! Addresses that the server listens on.

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener, ToSocketAddrs};

use socket2::{Domain, Socket, Type};

/// Handshakes that may wait to be accepted. The standard library's 128 are fewer than the
/// connections that a load tool opens at once: SYNs were dropped, and sent again after a second.
pub(crate) const BACKLOG: i32 = 4096;

/// Why the frontend could not start. Nothing runs after such an error.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address cannot be listened on.
    #[error(
        "cannot listen on {listen}; \
         choose another address with --listen, for example --listen 127.0.0.1:0"
    )]
    Bind {
        /// The address asked for.
        listen: String,
        /// The system's error.
        source: io::Error,
    },
    /// The address cannot be shared.
    #[error(
        "cannot share {listen} (`live.reuse_port`); every process that listens on it needs \
         `live.reuse_port` and the same user"
    )]
    Share {
        /// The address asked for.
        listen: String,
        /// The system's error.
        source: io::Error,
    },
    /// The socket that a service manager passed is of no use.
    #[error(
        "the socket from the service manager (LISTEN_FDS) is no listening TCP socket; use \
         `ListenStream=HOST:PORT` and `Accept=no` in its unit"
    )]
    Inherited {
        /// The system's error.
        source: io::Error,
    },
    /// A thread or its runtime could not be made.
    #[error("cannot start a frontend thread")]
    Thread(#[from] io::Error),
}

/// An address that is bound but not yet served, so that a taken port is found before any engine
/// starts.
pub struct Bound {
    pub(crate) socket: Socket,
    pub(crate) address: SocketAddr,
    pub(crate) sharing: Sharing,
    /// As configured, for errors.
    pub(crate) listen: String,
}

/// Whether other processes accept connections of the same address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// None does.
    Exclusive,
    /// Each has a socket of its own (`SO_REUSEPORT`), and the kernel chooses one per connection.
    Port,
    /// All have the same socket, which a service manager keeps.
    Socket,
}

impl Bound {
    /// Binds `listen` (`host:port`; port 0 picks a free one), exclusively.
    ///
    /// # Errors
    /// [`StartError::Bind`] with what to do about it.
    pub fn bind(listen: &str) -> Result<Bound, StartError> {
        Bound::to(listen, Sharing::Exclusive)
    }

    /// As [`Bound::bind`], together with other processes of the same user that bind it in this way. The kernel
    /// divides new connections among those whose [`Frontend::open`](crate::Frontend::open) has been called.
    ///
    /// # Errors
    /// [`StartError::Share`].
    pub fn bind_shared(listen: &str) -> Result<Bound, StartError> {
        Bound::to(listen, Sharing::Port)
    }

    /// Takes a socket that listens already, as service managers pass it.
    ///
    /// # Errors
    /// [`StartError::Inherited`]: it is no listening TCP socket.
    pub fn inherited(socket: StdListener) -> Result<Bound, StartError> {
        let check = || -> io::Result<Bound> {
            let socket = Socket::from(socket);
            if socket.r#type()? != Type::STREAM || !socket.is_listener()? {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            let no_address = || io::Error::from(io::ErrorKind::AddrNotAvailable);
            let address = socket.local_addr()?.as_socket().ok_or_else(no_address)?;
            socket.set_nonblocking(true)?;
            Ok(Bound {
                socket,
                address,
                sharing: Sharing::Socket,
                listen: address.to_string(),
            })
        };
        check().map_err(|source| StartError::Inherited { source })
    }

    fn to(listen: &str, sharing: Sharing) -> Result<Bound, StartError> {
        let bind = || -> io::Result<(Socket, SocketAddr)> {
            let mut last = io::Error::new(io::ErrorKind::InvalidInput, "the name has no address");
            for address in listen.to_socket_addrs()? {
                match bind_one(address, sharing) {
                    Ok(bound) => return Ok(bound),
                    Err(error) => last = error,
                }
            }
            Err(last)
        };
        let (socket, address) = bind().map_err(|source| {
            let listen = listen.into();
            match sharing {
                Sharing::Exclusive | Sharing::Socket => StartError::Bind { listen, source },
                Sharing::Port => StartError::Share { listen, source },
            }
        })?;
        Ok(Bound {
            socket,
            address,
            sharing,
            listen: listen.into(),
        })
    }

    /// The address bound, with the port that was picked.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether another process may accept connections of this address: before this one does, while it
    /// shuts down, and after.
    pub fn is_shared(&self) -> bool {
        self.sharing != Sharing::Exclusive
    }
}

/// Binds the first address of `listen` that can be bound.
pub(crate) fn bind(listen: &str) -> Result<(StdListener, SocketAddr), StartError> {
    let bound = Bound::bind(listen)?;
    Ok((bound.socket.into(), bound.address))
}

fn bind_one(address: SocketAddr, sharing: Sharing) -> io::Result<(Socket, SocketAddr)> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    // Only on request: otherwise a second server on the same port fails here instead of taking half of
    // the clients.
    socket.set_reuse_port(sharing == Sharing::Port)?;
    socket.bind(&address.into())?;
    socket.set_nonblocking(true)?;
    if sharing == Sharing::Exclusive {
        // A shared one listens once it is served: the kernel would hand connections to it.
        socket.listen(BACKLOG)?;
    }
    let no_address = || io::Error::from(io::ErrorKind::AddrNotAvailable);
    let address = socket.local_addr()?.as_socket().ok_or_else(no_address)?;
    Ok((socket, address))
}
