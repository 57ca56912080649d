//! NIXL, NVIDIA's library for transfers between inference engines, loaded at run time.
//!
//! The `nixl` packages on PyPI contain the library with a C interface, `libnixl_capi.so`. This
//! module binds a small part of it: an agent, memory that is registered once, and reads of a peer's
//! memory that are posted and polled. Nothing is linked, so a host that does not use NIXL needs no
//! library.
//!
//! Source of the functions, their arguments and their codes: `src/bindings/rust/wrapper.h` of NIXL
//! 1.5.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::ptr::{NonNull, null, null_mut};
use std::sync::Mutex;

use libloading::Library;
use slipstream_base::sync::lock;

/// How a transport that reads by NIXL is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NixlOptions {
    /// `libnixl_capi.so` of the `nixl` package.
    pub library: PathBuf,
    /// The NIXL backend that moves the bytes.
    pub backend: String,
    /// Memory that blocks are read into, before they are verified and copied to their destination.
    /// It is registered once, and bounds the bytes in flight.
    pub staging_bytes: usize,
}

impl NixlOptions {
    /// UCX, which chooses between RDMA, shared memory and TCP; 64 MiB of staging memory.
    pub fn new(library: &Path) -> NixlOptions {
        NixlOptions {
            library: library.to_path_buf(),
            backend: "UCX".into(),
            staging_bytes: 64 << 20,
        }
    }
}

/// Why NIXL cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NixlError {
    /// The library is missing or does not load.
    #[error(
        "NIXL's library {} cannot be used: {why}; pip install 'slipstream[nixl]', or set its path \
         in SLIPSTREAM_NIXL_LIBRARY",
        path.display()
    )]
    Library {
        /// The path that was tried.
        path: PathBuf,
        /// The loader's error.
        why: String,
    },
    /// A call of the library failed.
    #[error("NIXL: {what} failed with code {code}; set NIXL_LOG_LEVEL=info for details")]
    Call {
        /// The operation.
        what: &'static str,
        /// `nixl_capi_status_t`.
        code: i32,
    },
    /// A name that contains a zero byte, which C cannot represent.
    #[error("NIXL: a name contains a zero byte")]
    Name,
}

type Handle = *mut c_void;

/// `NIXL_CAPI_SUCCESS`, `NIXL_CAPI_IN_PROG`; errors are below 0.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 1;
/// `NIXL_CAPI_MEM_DRAM`.
const HOST_MEMORY: c_int = 0;
/// `NIXL_CAPI_XFER_OP_READ`.
const READ: c_int = 0;

/// `nixl_capi_agent_config_t`.
#[repr(C)]
struct Config {
    progress_thread: bool,
    listen_thread: bool,
    listen_port: c_int,
    thread_sync: c_int,
    workers: c_uint,
    progress_delay_us: u64,
    listen_delay_us: u64,
    telemetry: bool,
}

/// The caller's thread does all work. A progress thread of NIXL 1.5.1 takes an entire core even
/// when idle. No locks are needed, as one thread at a time uses an agent.
static CONFIG: Config = Config {
    progress_thread: false,
    listen_thread: false,
    listen_port: 0,
    thread_sync: 0,
    workers: 1,
    progress_delay_us: 0,
    listen_delay_us: 0,
    telemetry: false,
};

/// Declares the functions, and finds them in a library.
macro_rules! functions {
    ($($name:ident ( $($argument:ty),* );)*) => {
        #[derive(Clone, Copy)]
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            /// # Safety
            ///
            /// `library` is NIXL's, with functions of these arguments.
            unsafe fn find(library: &Library) -> Result<Functions, libloading::Error> {
                Ok(Functions {
                    $($name: {
                        let symbol = concat!("nixl_capi_", stringify!($name), "\0");
                        // SAFETY: the caller's promise.
                        *unsafe { library.get(symbol.as_bytes()) }?
                    },)*
                })
            }
        }
    };
}

functions! {
    create_configured_agent(*const c_char, *const Config, *mut Handle);
    destroy_agent(Handle);
    get_plugin_params(Handle, *const c_char, *mut Handle, *mut Handle);
    destroy_mem_list(Handle);
    destroy_params(Handle);
    create_backend(Handle, *const c_char, Handle, *mut Handle);
    destroy_backend(Handle);
    create_opt_args(*mut Handle);
    opt_args_add_backend(Handle, Handle);
    destroy_opt_args(Handle);
    create_reg_dlist(c_int, *mut Handle);
    reg_dlist_add_desc(Handle, usize, usize, u64, *const c_void, usize);
    destroy_reg_dlist(Handle);
    register_mem(Handle, Handle, Handle);
    deregister_mem(Handle, Handle, Handle);
    get_local_md(Handle, *mut *mut c_void, *mut usize);
    load_remote_md(Handle, *const c_void, usize, *mut *mut c_char);
    invalidate_remote_md(Handle, *const c_char);
    create_xfer_dlist(c_int, *mut Handle);
    xfer_dlist_add_desc(Handle, usize, usize, u64);
    destroy_xfer_dlist(Handle);
    create_xfer_req(Handle, c_int, Handle, Handle, *const c_char, *mut Handle, Handle);
    post_xfer_req(Handle, Handle, Handle);
    get_xfer_status(Handle, Handle);
    create_notif_map(*mut Handle);
    get_notifs(Handle, Handle, Handle);
    destroy_notif_map(Handle);
    release_xfer_req(Handle, Handle);
    destroy_xfer_req(Handle);
}

unsafe extern "C" {
    /// From the C library: callers free some of the memory that NIXL returns.
    fn free(memory: *mut c_void);
}

fn checked(what: &'static str, code: c_int) -> Result<(), NixlError> {
    if code == SUCCESS {
        Ok(())
    } else {
        Err(NixlError::Call { what, code })
    }
}

impl Functions {
    /// The functions of the library at `path`, which stays loaded.
    fn open(path: &Path) -> Result<Functions, NixlError> {
        static OPEN: Mutex<Vec<(PathBuf, Functions)>> = Mutex::new(Vec::new());
        let failed = |error: libloading::Error| NixlError::Library {
            path: path.to_path_buf(),
            why: error.to_string(),
        };
        let mut open = lock(&OPEN);
        if let Some((_, functions)) = open.iter().find(|(of, _)| of == path) {
            return Ok(*functions);
        }
        // SAFETY: loading runs the library's own initializers, which the user requested by naming
        // it. The functions have these arguments in the releases that the package's extra allows.
        let functions = unsafe {
            let library = Library::new(path).map_err(failed)?;
            let functions = Functions::find(&library).map_err(failed)?;
            // Its backends have threads and hooks that never end, so the library must not be
            // unloaded.
            std::mem::forget(library);
            functions
        };
        open.push((path.to_path_buf(), functions));
        Ok(functions)
    }
}

/// Bytes of a peer's memory, and their destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// Address in this process.
    pub(crate) to: usize,
    /// Address in the peer's process.
    pub(crate) from: usize,
    pub(crate) bytes: usize,
}

/// Identifies a posted read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Ticket(pub(crate) usize);

/// The state of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadState {
    InFlight,
    /// All bytes have arrived.
    Done,
    /// It has ended without all bytes. Nothing more is written.
    Failed,
}

/// Reads the memory of other processes by addresses that they publish: NIXL, or a substitute in
/// tests. Used by one thread; no call waits.
pub(crate) trait OneSided: Send {
    /// The metadata that peers need to read this side's memory.
    fn introduction(&mut self) -> Result<Vec<u8>, NixlError>;

    /// Loads a peer's [`OneSided::introduction`]; returns the peer's name.
    fn load_peer(&mut self, introduction: &[u8]) -> Result<String, NixlError>;

    /// Unloads a peer's metadata. No read of it is in flight.
    fn unload_peer(&mut self, peer: &str);

    /// Starts a read.
    ///
    /// # Safety
    ///
    /// The `to` of each span is registered memory of this side. Nothing else accesses it until
    /// [`OneSided::poll`] reports the end of the read.
    unsafe fn read(&mut self, peer: &str, spans: &[Span]) -> Result<Ticket, NixlError>;

    /// The state of a read. A ticket is void once its read has ended.
    fn poll(&mut self, ticket: Ticket) -> ReadState;

    /// Does the work that peers need to read this side's memory, if any.
    fn progress(&mut self);
}

/// An agent of NIXL, with one backend.
pub(crate) struct Agent {
    functions: Functions,
    agent: Handle,
    backend: Handle,
    options: Handle,
    messages: Handle,
    registered: Vec<Handle>,
}

// SAFETY: the agent is used by one thread at a time (`&mut self`), and belongs to none.
unsafe impl Send for Agent {}

impl Agent {
    /// `name` differs from that of every other agent.
    pub(crate) fn new(options: &NixlOptions, name: &str) -> Result<Agent, NixlError> {
        let functions = Functions::open(&options.library)?;
        let name = CString::new(name).map_err(|_| NixlError::Name)?;
        let backend = CString::new(&options.backend[..]).map_err(|_| NixlError::Name)?;
        let mut agent = null_mut();
        // SAFETY: a terminated string, and a place for the handle.
        let code = unsafe {
            (functions.create_configured_agent)(name.as_ptr(), &raw const CONFIG, &raw mut agent)
        };
        checked("creating an agent", code)?;
        // From here on, `Drop` releases it in order.
        let mut made = Agent {
            functions,
            agent,
            backend: null_mut(),
            options: null_mut(),
            messages: null_mut(),
            registered: Vec::new(),
        };
        let (mut memories, mut parameters) = (null_mut(), null_mut());
        // SAFETY: handles created above, terminated strings, places for handles.
        unsafe {
            let code = (functions.get_plugin_params)(
                agent,
                backend.as_ptr(),
                &raw mut memories,
                &raw mut parameters,
            );
            checked("finding the backend", code)?;
            let backend = backend.as_ptr();
            let code =
                (functions.create_backend)(agent, backend, parameters, &raw mut made.backend);
            (functions.destroy_mem_list)(memories);
            (functions.destroy_params)(parameters);
            checked("starting the backend", code)?;
            let code = (functions.create_opt_args)(&raw mut made.options);
            checked("choosing the backend", code)?;
            let code = (functions.opt_args_add_backend)(made.options, made.backend);
            checked("choosing the backend", code)?;
            let code = (functions.create_notif_map)(&raw mut made.messages);
            checked("creating the list of messages", code)?;
        }
        Ok(made)
    }

    /// Lets backends read and write some memory.
    ///
    /// # Safety
    ///
    /// The memory stays valid until the agent is dropped.
    pub(crate) unsafe fn register(
        &mut self,
        base: NonNull<u8>,
        bytes: usize,
    ) -> Result<(), NixlError> {
        let functions = self.functions;
        let mut list = null_mut();
        // SAFETY: a place for a handle, and then that handle; the caller's promise on the memory.
        unsafe {
            let code = (functions.create_reg_dlist)(HOST_MEMORY, &raw mut list);
            checked("registering memory", code)?;
            let at = base.as_ptr() as usize;
            let mut code = (functions.reg_dlist_add_desc)(list, at, bytes, 0, null(), 0);
            if code == SUCCESS {
                code = (functions.register_mem)(self.agent, list, self.options);
            }
            if code != SUCCESS {
                (functions.destroy_reg_dlist)(list);
            }
            checked("registering memory", code)?;
        }
        self.registered.push(list);
        Ok(())
    }
}

/// A list of spans at one end, needed only to create a request.
struct DescriptorList {
    functions: Functions,
    list: Handle,
}

impl DescriptorList {
    fn new(
        functions: Functions,
        spans: impl Iterator<Item = (usize, usize)>,
    ) -> Result<DescriptorList, NixlError> {
        let mut made = DescriptorList {
            functions,
            list: null_mut(),
        };
        // SAFETY: a place for a handle, and then that handle.
        unsafe {
            let code = (functions.create_xfer_dlist)(HOST_MEMORY, &raw mut made.list);
            checked("listing memory", code)?;
            for (at, bytes) in spans {
                let code = (functions.xfer_dlist_add_desc)(made.list, at, bytes, 0);
                checked("listing memory", code)?;
            }
        }
        Ok(made)
    }
}

impl Drop for DescriptorList {
    fn drop(&mut self) {
        if !self.list.is_null() {
            // SAFETY: created by `new`, and destroyed once.
            unsafe { (self.functions.destroy_xfer_dlist)(self.list) };
        }
    }
}

impl OneSided for Agent {
    fn introduction(&mut self) -> Result<Vec<u8>, NixlError> {
        let (mut data, mut bytes) = (null_mut(), 0);
        // SAFETY: places for the results: `len` bytes, which this side frees.
        unsafe {
            let code = (self.functions.get_local_md)(self.agent, &raw mut data, &raw mut bytes);
            checked("describing this side's memory", code)?;
            let copy = std::slice::from_raw_parts(data.cast::<u8>(), bytes).to_vec();
            free(data);
            Ok(copy)
        }
    }

    fn load_peer(&mut self, introduction: &[u8]) -> Result<String, NixlError> {
        let mut name = null_mut();
        let (data, bytes) = (introduction.as_ptr().cast(), introduction.len());
        // SAFETY: the bytes of a slice, and a place for a string that this side frees.
        unsafe {
            let code = (self.functions.load_remote_md)(self.agent, data, bytes, &raw mut name);
            checked("loading a peer's metadata", code)?;
            let copy = CStr::from_ptr(name).to_string_lossy().into_owned();
            free(name.cast());
            Ok(copy)
        }
    }

    fn unload_peer(&mut self, peer: &str) {
        let Ok(peer) = CString::new(peer) else { return };
        // SAFETY: a terminated string. An unknown peer is an error without effect.
        let _ = unsafe { (self.functions.invalidate_remote_md)(self.agent, peer.as_ptr()) };
    }

    unsafe fn read(&mut self, peer: &str, spans: &[Span]) -> Result<Ticket, NixlError> {
        let functions = self.functions;
        let peer = CString::new(peer).map_err(|_| NixlError::Name)?;
        let local = DescriptorList::new(functions, spans.iter().map(|span| (span.to, span.bytes)))?;
        let remote =
            DescriptorList::new(functions, spans.iter().map(|span| (span.from, span.bytes)))?;
        let mut request = null_mut();
        // SAFETY: handles of this agent and a terminated string; the memory is the caller's
        // promise. A request that could not be posted has started nothing.
        unsafe {
            let code = (functions.create_xfer_req)(
                self.agent,
                READ,
                local.list,
                remote.list,
                peer.as_ptr(),
                &raw mut request,
                self.options,
            );
            checked("preparing a read", code)?;
            let code = (functions.post_xfer_req)(self.agent, request, null_mut());
            if code != SUCCESS && code != IN_PROGRESS {
                self.release(request);
                return Err(NixlError::Call {
                    what: "posting a read",
                    code,
                });
            }
        }
        Ok(Ticket(request as usize))
    }

    fn poll(&mut self, ticket: Ticket) -> ReadState {
        let request = ticket.0 as Handle;
        // SAFETY: a request of this agent that has not ended yet: tickets are void afterwards.
        let code = unsafe { (self.functions.get_xfer_status)(self.agent, request) };
        if code == IN_PROGRESS {
            return ReadState::InFlight;
        }
        self.release(request);
        if code == SUCCESS {
            ReadState::Done
        } else {
            ReadState::Failed
        }
    }

    fn progress(&mut self) {
        // There are no messages, but polling for them runs the backend. SAFETY: handles of this
        // agent. An error has no effect.
        let _ = unsafe { (self.functions.get_notifs)(self.agent, self.messages, self.options) };
    }
}

impl Agent {
    /// Releases a request that has ended.
    fn release(&mut self, request: Handle) {
        // SAFETY: a request of this agent, released once. One that NIXL cannot release is leaked.
        unsafe {
            if (self.functions.release_xfer_req)(self.agent, request) == SUCCESS {
                (self.functions.destroy_xfer_req)(request);
            }
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let functions = self.functions;
        // SAFETY: this agent created each handle and destroys it once, users before what they use.
        // Destroying the agent ends its backend, and with it all reads.
        unsafe {
            for list in self.registered.drain(..) {
                (functions.deregister_mem)(self.agent, list, self.options);
                (functions.destroy_reg_dlist)(list);
            }
            if !self.messages.is_null() {
                (functions.destroy_notif_map)(self.messages);
            }
            if !self.options.is_null() {
                (functions.destroy_opt_args)(self.options);
            }
            (functions.destroy_agent)(self.agent);
            if !self.backend.is_null() {
                (functions.destroy_backend)(self.backend);
            }
        }
    }
}
