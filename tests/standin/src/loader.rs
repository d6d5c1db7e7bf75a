//! Loading the stand-in into a test, and steering it without unsafe code.

use std::ffi::{CString, c_char};
use std::fmt;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use aquifer_device::Code;
use aquifer_device::sim::{Fault, SimConfig};
use libloading::Library;

use crate::control::{Buffer, Mapped, Number, PROTOCOL, SEPARATOR};
#[cfg(target_os = "linux")]
use crate::environment::Environment;
#[cfg(target_os = "linux")]
use crate::exports;
use crate::text;

/// Names the library where it is not beside the test.
const LIBRARY: &str = "AQUIFER_STANDIN_LIBRARY";

#[cfg(target_os = "linux")]
const FILE: &str = "libaquifer_standin.so";

/// Room for text at first.
const TEXT_BYTES: usize = 4096;

/// Why the stand-in could not be loaded.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// Taking the driver's place by name is something that the loader of Linux does.
    #[error("the stand-in driver can only be loaded on Linux")]
    NotLinux,
    /// The library was not built, or is elsewhere.
    #[error(
        "{name} is in none of {}: a test that depends on the crate aquifer-standin finds it beside itself; elsewhere set {LIBRARY} to its path",
        Paths(searched)
    )]
    Missing {
        /// The file's name.
        name: String,
        /// Where it was looked for.
        searched: Vec<PathBuf>,
    },
    /// The library is there and cannot be loaded.
    #[error("{}: {error}", path.display())]
    Unusable {
        /// Where it is.
        path: PathBuf,
        /// What is wrong with it.
        error: String,
    },
    /// An environment variable of the stand-in cannot be understood.
    #[error("the environment of the stand-in: {0}")]
    Environment(String),
}

struct Paths<'a>(&'a [PathBuf]);

impl fmt::Display for Paths<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0
            .iter()
            .enumerate()
            .try_for_each(|(place, path)| write!(f, "{}{}", if place > 0 { ", " } else { "" }, path.display()))
    }
}

/// A request that the stand-in refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {} ({}){}{text}", code.name(), code.0, if text.is_empty() { "" } else { ": " })]
#[non_exhaustive]
pub struct Refused {
    /// What was asked for.
    pub what: &'static str,
    /// The code that came back.
    pub code: Code,
    /// Why, where that was said.
    pub text: String,
}

/// The loaded stand-in.
pub struct Standin {
    path: PathBuf,
    functions: Functions,
}

impl fmt::Debug for Standin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Standin").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Loads the stand-in, once for the process, for ever. It must come before anything calls the CUDA driver.
///
/// Symbols that a driver of the version in `AQUIFER_STANDIN_VERSION` lacks, and those in `AQUIFER_STANDIN_WITHOUT`, are not
/// there to be found.
///
/// # Errors
/// When the library is not there or cannot be loaded, or the environment makes no sense.
pub fn load() -> Result<&'static Standin, LoadError> {
    static LOADED: OnceLock<Result<Standin, LoadError>> = OnceLock::new();
    LOADED.get_or_init(open).as_ref().map_err(LoadError::clone)
}

#[cfg(not(target_os = "linux"))]
fn open() -> Result<Standin, LoadError> {
    Err(LoadError::NotLinux)
}

#[cfg(target_os = "linux")]
fn open() -> Result<Standin, LoadError> {
    let environment = Environment::read().map_err(LoadError::Environment)?;
    let path = find()?;
    let missing: Vec<_> = exports::missing(environment.version, &environment.without).collect();
    let unusable = |error: String| LoadError::Unusable { path: path.clone(), error };
    let library = if missing.is_empty() {
        load_library(&path)
    } else {
        without(&path, &missing).and_then(|copy| {
            let library = load_library(&copy);
            // Loaded or not, the file has served its purpose.
            let removed = std::fs::remove_file(&copy).map_err(|error| error.to_string());
            library.and_then(|library| removed.map(|()| library))
        })
    };
    let library = library.map_err(unusable)?;
    let functions = Functions::of(library).map_err(unusable)?;
    let standin = Standin { path: path.clone(), functions };
    standin.check().map_err(|refused| unusable(refused.to_string()))?;
    Ok(standin)
}

/// The library beside the running program, or where the environment says.
#[cfg(target_os = "linux")]
fn find() -> Result<PathBuf, LoadError> {
    if let Some(path) = std::env::var_os(LIBRARY) {
        return Ok(PathBuf::from(path));
    }
    let program = std::env::current_exe().unwrap_or_default();
    let folders = program.ancestors().skip(1).take(2);
    let searched: Vec<PathBuf> =
        folders.flat_map(|folder| [folder.join(FILE), folder.join("deps").join(FILE)]).collect();
    let found = searched.iter().find(|path| path.is_file()).cloned();
    found.ok_or(LoadError::Missing { name: FILE.to_owned(), searched })
}

#[cfg(target_os = "linux")]
fn load_library(path: &Path) -> Result<&'static Library, String> {
    // SAFETY: the library runs no code when it is loaded.
    let library = unsafe { Library::new(path) }.map_err(described)?;
    Ok(Box::leak(Box::new(library)))
}

/// An error with its causes.
#[cfg(target_os = "linux")]
fn described(error: libloading::Error) -> String {
    use std::error::Error as _;
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// A copy of the library in which some symbols have another name, so that nobody finds them: how an older driver looks.
#[cfg(target_os = "linux")]
fn without(path: &Path, symbols: &[&str]) -> Result<PathBuf, String> {
    let mut image = std::fs::read(path).map_err(|error| error.to_string())?;
    let mut start = 0;
    while let Some(length) = image[start..].iter().position(|&byte| byte == 0) {
        if symbols.iter().any(|symbol| symbol.as_bytes() == &image[start..start + length]) {
            image[start] = b'-';
        }
        start += length + 1;
    }
    let copy = std::env::temp_dir().join(format!("aquifer-standin-{}.so", std::process::id()));
    std::fs::write(&copy, image).map_err(|error| format!("{}: {error}", copy.display()))?;
    Ok(copy)
}

/// Declares the table of control functions and how it is filled.
macro_rules! functions {
    ($($name:ident($($type:ty),*);)*) => {
        #[allow(clippy::type_complexity, reason = "the signatures of the functions in `control.rs`")]
        struct Functions {
            $($name: unsafe extern "C" fn($($type),*) -> u32,)*
        }

        impl Functions {
            fn of(library: &'static Library) -> Result<Functions, String> {
                Ok(Functions {$(
                    $name: {
                        // SAFETY: the library is never unloaded, and `standin_protocol` tells whether it has these functions
                        // in this shape; that one never changes.
                        let found = unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) };
                        *found.map_err(|error| error.to_string())?
                    },
                )*})
            }
        }

        /// The table's types are those of the functions.
        const _: fn() -> Functions = || Functions { $($name: crate::control::$name,)* };
    };
}

type Text<'a> = Option<&'a mut Buffer>;
type Result32<'a> = Option<&'a mut MaybeUninit<u32>>;
type Result64<'a> = Option<&'a mut MaybeUninit<u64>>;

functions! {
    standin_protocol(Result32<'_>);
    standin_check_environment(Text<'_>);
    standin_add_device(*const c_char, Result32<'_>, Text<'_>);
    standin_remove_device(u32);
    standin_inject(u32, *const c_char, Text<'_>);
    standin_clear_faults(u32);
    standin_violations(u32, u32, Text<'_>);
    standin_advance(u32, u64);
    standin_stall(u32, u64, u64);
    standin_set_other_process_bytes(u32, u64);
    standin_number(u32, u32, Result64<'_>);
    standin_calls(u32, *const c_char, Result64<'_>);
    standin_mapping(u32, u64, Option<&mut MaybeUninit<Mapped>>);
    standin_host_access(u32, usize, usize, u32);
    standin_fail(*const c_char, u64, u32);
    standin_orders_left(Result64<'_>, Option<&u32>);
}

impl Standin {
    /// Where the library was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Refuses a library of another version, and an environment that it does not understand.
    fn check(&self) -> Result<(), Refused> {
        let version = out("standin_protocol", |version: Option<&mut MaybeUninit<u32>>| {
            // SAFETY: the pointer is valid during the call.
            unsafe { (self.functions.standin_protocol)(version) }
        })?;
        if version != PROTOCOL {
            let text = format!("the library has version {version} of the control functions, the loader {PROTOCOL}");
            return Err(Refused { what: "standin_protocol", code: Code::NOT_SUPPORTED, text });
        }
        with_text("standin_check_environment", |text| {
            // SAFETY: the buffer is valid during the call.
            unsafe { (self.functions.standin_check_environment)(text) }
        })
        .map(|_| ())
    }

    /// Adds a device, configured as after `sim:`, such as `24GiB,seed=7`. It is removed when the result is dropped.
    ///
    /// # Errors
    /// When the configuration cannot be understood, or there are too many devices.
    pub fn add_device(&'static self, config: &str) -> Result<StandinDevice, Refused> {
        let config = text_argument("standin_add_device", config)?;
        let mut ordinal = MaybeUninit::new(0);
        with_text("standin_add_device", |text| {
            // SAFETY: text, result and buffer are valid during the call.
            unsafe { (self.functions.standin_add_device)(config.as_ptr(), Some(&mut ordinal), text) }
        })?;
        // SAFETY: initialised above.
        let ordinal = unsafe { ordinal.assume_init() };
        Ok(StandinDevice { standin: self, ordinal, removed_on_drop: true })
    }

    /// As [`Standin::add_device`], with a device like `config`. Its ordinal is not that of the configuration.
    ///
    /// # Errors
    /// When the device would panic on violations, which no panic could tell beyond the library, or there are too many devices.
    pub fn add_device_like(&'static self, config: &SimConfig) -> Result<StandinDevice, Refused> {
        let unsaid = "text cannot say this configuration";
        self.add_device(&text::config(config).ok_or_else(|| unsupported("standin_add_device", unsaid))?)
    }

    /// A device of the environment, by ordinal. It stays when the result is dropped.
    pub fn device(&'static self, ordinal: u32) -> StandinDevice {
        StandinDevice { standin: self, ordinal, removed_on_drop: false }
    }

    /// Makes the nth call (from 1) of a function of the CUDA driver, or of `any`, fail in the calling thread. Such a call does
    /// nothing else.
    ///
    /// # Errors
    /// When there is no such function or code, or `nth` is 0.
    pub fn fail(&self, function: &str, nth: u64, code: Code) -> Result<(), Refused> {
        let function = text_argument("standin_fail", function)?;
        // SAFETY: the text is valid during the call.
        answer("standin_fail", unsafe { (self.functions.standin_fail)(function.as_ptr(), nth, code.0) })
    }

    /// How many failures that the calling thread ordered did not come yet.
    pub fn orders_left(&self) -> u64 {
        self.orders(false)
    }

    /// Forgets the failures that the calling thread ordered, and tells how many did not come.
    pub fn clear_orders(&self) -> u64 {
        self.orders(true)
    }

    fn orders(&self, clear: bool) -> u64 {
        let left = out("standin_orders_left", |left: Option<&mut MaybeUninit<u64>>| {
            // SAFETY: the pointers are valid during the call.
            unsafe { (self.functions.standin_orders_left)(left, clear.then_some(&0)) }
        });
        left.unwrap_or(0)
    }
}

/// A device of the stand-in, for a test to steer.
#[derive(Debug)]
pub struct StandinDevice {
    standin: &'static Standin,
    ordinal: u32,
    removed_on_drop: bool,
}

impl Drop for StandinDevice {
    fn drop(&mut self) {
        if self.removed_on_drop {
            // SAFETY: takes no pointers.
            unsafe { (self.standin.functions.standin_remove_device)(self.ordinal) };
        }
    }
}

impl StandinDevice {
    /// Its ordinal, by which CUDA programs open it.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    fn functions(&self) -> &'static Functions {
        &self.standin.functions
    }

    /// Adds faults, as settings of a simulated device: `fault=cuMemAlloc#3:out_of_memory,lost_at=9`. They count calls from now
    /// on, and end with the contexts of the device.
    ///
    /// # Errors
    /// When they cannot be understood.
    pub fn inject(&self, faults: &str) -> Result<(), Refused> {
        let faults = text_argument("standin_inject", faults)?;
        with_text("standin_inject", |text| {
            // SAFETY: text and buffer are valid during the call.
            unsafe { (self.functions().standin_inject)(self.ordinal, faults.as_ptr(), text) }
        })
        .map(|_| ())
    }

    /// As [`StandinDevice::inject`].
    ///
    /// # Errors
    /// When text cannot say it: a fault that is newer than this crate.
    pub fn inject_fault(&self, fault: &Fault) -> Result<(), Refused> {
        let unsaid = || unsupported("standin_inject", "text cannot say this fault");
        self.inject(&text::fault(fault).ok_or_else(unsaid)?)
    }

    /// Removes all faults. A lost device stays lost.
    pub fn clear_faults(&self) {
        // SAFETY: takes no pointers.
        self.must("standin_clear_faults", unsafe { (self.functions().standin_clear_faults)(self.ordinal) });
    }

    /// What the race detector found and nobody took, oldest first.
    pub fn violations(&self) -> Vec<String> {
        self.found(false)
    }

    /// Takes what the race detector found, oldest first.
    pub fn take_violations(&self) -> Vec<String> {
        self.found(true)
    }

    fn found(&self, take: bool) -> Vec<String> {
        let found = with_text("standin_violations", |text| {
            // SAFETY: the buffer is valid during the call.
            unsafe { (self.functions().standin_violations)(self.ordinal, take.into(), text) }
        });
        let found = self.expect(found);
        found.split(SEPARATOR).filter(|text| !text.is_empty()).map(str::to_owned).collect()
    }

    /// Lets virtual time pass, as a host that computes does.
    pub fn advance(&self, time: Duration) {
        // SAFETY: takes no pointers.
        self.must("standin_advance", unsafe { (self.functions().standin_advance)(self.ordinal, nanoseconds(time)) });
    }

    /// Keeps a stream, by the driver's handle, from starting later work for `time` from the end of its present work.
    ///
    /// # Errors
    /// When the stream is not live.
    pub fn stall(&self, stream: u64, time: Duration) -> Result<(), Refused> {
        // SAFETY: takes no pointers.
        answer("standin_stall", unsafe { (self.functions().standin_stall)(self.ordinal, stream, nanoseconds(time)) })
    }

    /// The bytes that another process holds from now on.
    pub fn set_other_process_bytes(&self, bytes: u64) {
        let set = self.functions().standin_set_other_process_bytes;
        // SAFETY: takes no pointers.
        self.must("standin_set_other_process_bytes", unsafe { set(self.ordinal, bytes) });
    }

    /// A number that only the simulated device knows.
    pub fn number(&self, which: Number) -> u64 {
        let number = out("standin_number", |number: Option<&mut MaybeUninit<u64>>| {
            // SAFETY: the pointer is valid during the call.
            unsafe { (self.functions().standin_number)(self.ordinal, which as u32, number) }
        });
        self.expect(number)
    }

    /// How often a function of the CUDA driver, by symbol such as `cuMemAlloc_v2`, got as far as this device.
    ///
    /// # Errors
    /// When there is no such function.
    pub fn calls(&self, function: &str) -> Result<u64, Refused> {
        let function = text_argument("standin_calls", function)?;
        out("standin_calls", |calls: Option<&mut MaybeUninit<u64>>| {
            // SAFETY: the pointers are valid during the call.
            unsafe { (self.functions().standin_calls)(self.ordinal, function.as_ptr(), calls) }
        })
    }

    /// What is mapped at an address.
    pub fn mapping_at(&self, ptr: u64) -> Option<Mapped> {
        let mapped = out("standin_mapping", |mapped: Option<&mut MaybeUninit<Mapped>>| {
            // SAFETY: the pointer is valid during the call.
            unsafe { (self.functions().standin_mapping)(self.ordinal, ptr, mapped) }
        });
        mapped.ok()
    }

    /// Tells the race detector that the host touches page-locked memory now, which CUDA cannot be told.
    pub fn host_access(&self, ptr: usize, bytes: usize, writes: bool) {
        let tell = self.functions().standin_host_access;
        // SAFETY: takes no pointers; the address is only looked up.
        self.must("standin_host_access", unsafe { tell(self.ordinal, ptr, bytes, writes.into()) });
    }

    /// Panics where a function fails that only a device which is gone can fail.
    fn must(&self, what: &'static str, code: u32) {
        self.expect(answer(what, code));
    }

    fn expect<T>(&self, outcome: Result<T, Refused>) -> T {
        outcome.unwrap_or_else(|refused| panic!("device {} of the stand-in: {refused}", self.ordinal))
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn unsupported(what: &'static str, text: &str) -> Refused {
    Refused { what, code: Code::NOT_SUPPORTED, text: text.to_owned() }
}

/// The outcome of a control function.
fn answer(what: &'static str, code: u32) -> Result<(), Refused> {
    match code {
        0 => Ok(()),
        code => Err(Refused { what, code: Code(code), text: String::new() }),
    }
}

fn text_argument(what: &'static str, text: &str) -> Result<CString, Refused> {
    CString::new(text).map_err(|error| Refused { what, code: Code::INVALID_VALUE, text: error.to_string() })
}

/// The result of a control function, which it stores if it succeeds.
fn out<T: Default>(what: &'static str, call: impl FnOnce(Option<&mut MaybeUninit<T>>) -> u32) -> Result<T, Refused> {
    let mut result = MaybeUninit::new(T::default());
    answer(what, call(Some(&mut result)))?;
    // SAFETY: initialised above.
    Ok(unsafe { result.assume_init() })
}

/// Calls a control function with room for text, again with more while it says that there was too little.
fn with_text(what: &'static str, mut call: impl FnMut(Text<'_>) -> u32) -> Result<String, Refused> {
    let mut room = vec![0_u8; TEXT_BYTES];
    loop {
        let mut buffer = Buffer { start: room.as_mut_ptr().cast(), capacity: room.len(), length: 0 };
        let code = call(Some(&mut buffer));
        let length = buffer.length;
        if length < room.len() {
            room.truncate(length);
            let text = String::from_utf8_lossy(&room).into_owned();
            return answer(what, code).map(|()| text.clone()).map_err(|refused| Refused { text, ..refused });
        }
        room = vec![0; length + 1];
    }
}
