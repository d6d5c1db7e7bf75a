//! Loading the stand-in into a test, so that it is used without unsafe code.

use std::ffi::c_char;
use std::fmt;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use aquifer_device::Code;
use libloading::Library;

use crate::control::{Buffer, Mapped, PROTOCOL};
#[cfg(target_os = "linux")]
use crate::environment::Environment;
#[cfg(target_os = "linux")]
use crate::exports;
use crate::steering::{StandinDevice, answer, out, text_argument, with_text};

/// Names the library where it is not in the test's folder.
const LIBRARY: &str = "AQUIFER_STANDIN_LIBRARY";

#[cfg(target_os = "linux")]
const FILE: &str = "libaquifer_standin.so";

/// Why the stand-in could not be loaded.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// Taking the driver's place by name is something that the loader of Linux does.
    #[error("the stand-in driver can only be loaded on Linux")]
    NotLinux,
    /// The library was not built, or is elsewhere.
    #[error(
        "{name} is in none of {}: a test that depends on the crate aquifer-standin finds it in its folder; elsewhere \
         set {LIBRARY} to its path",
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
    pub(crate) functions: Functions,
}

impl fmt::Debug for Standin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Standin").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Loads the stand-in, once for the process, for ever. It must come before anything calls the CUDA
/// driver.
///
/// Symbols that a driver of the version in `AQUIFER_STANDIN_VERSION` lacks, and those in
/// `AQUIFER_STANDIN_WITHOUT`, are not there to be found.
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

/// The library in the folder of the running program, or where the environment says.
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

/// A copy of the library in which some symbols have another name, so that they are not found, as in
/// an older driver.
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
        pub(crate) struct Functions {
            $(pub(crate) $name: unsafe extern "C" fn($($type),*) -> u32,)*
        }

        impl Functions {
            fn of(library: &'static Library) -> Result<Functions, String> {
                Ok(Functions {$(
                    $name: {
                        // SAFETY: the library is never unloaded, and `standin_protocol` tells
                        // whether it has these functions in this shape; that one never changes.
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

pub(crate) type Text<'a> = Option<&'a mut Buffer>;
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
    standin_destructors(u32, u32);
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

    /// Adds a device, configured as after `sim:`, such as `24GiB,seed=7`. It is removed when the
    /// result is dropped.
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

    /// A device of the environment, by ordinal. It stays when the result is dropped.
    pub fn device(&'static self, ordinal: u32) -> StandinDevice {
        StandinDevice { standin: self, ordinal, removed_on_drop: false }
    }

    /// Makes the nth call (from 1) of a function of the CUDA driver, or of `any`, fail in the
    /// calling thread. Such a call does nothing else.
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
