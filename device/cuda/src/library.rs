//! Finding the driver's library. It is kept for the life of the process: a driver cannot be
//! unloaded safely.

use std::env;
use std::path::{Path, PathBuf};

use aquifer_device::fork::Mutex;
use aquifer_device::{Code, DeviceError, Operation, Result};
use libloading::Library;

use crate::unavailable::Unavailable;

/// Names the driver's library, if it is not the one that the system finds.
const VARIABLE: &str = "AQUIFER_CUDA_LIBRARY";

/// The library that the program chose, and whether one was opened.
#[derive(Debug)]
struct Choice {
    path: Option<PathBuf>,
    is_open: bool,
}

static CHOICE: Mutex<Choice> = Mutex::new(Choice { path: None, is_open: false });

/// Chooses the CUDA driver's library, by its path or by a name that the system's loader looks for.
/// Without this call it is the one that the environment variable `AQUIFER_CUDA_LIBRARY` names, else
/// the installed one.
///
/// This is for libraries that stand before the driver under its name and call Aquifer, which would
/// find them instead of the driver. If the library cannot be loaded, there is no GPU
/// ([`Unavailable::NoDriver`]); no other one is tried.
///
/// cudarc loads the driver by itself, by name.
///
/// # Safety
/// The library is a CUDA driver: its functions have the signatures and effects that CUDA documents.
/// If objects are passed to and from cudarc, or other users of CUDA in the process, it knows the
/// handles of the driver that these load.
///
/// # Errors
/// When the driver has been loaded already: call this before anything asks for a GPU.
pub unsafe fn set_library(path: impl AsRef<Path>) -> Result<()> {
    let mut choice = CHOICE.lock();
    if choice.is_open {
        return Err(DeviceError::refused(Operation::Init, Code::INVALID_VALUE)
            .of_request("no library was chosen")
            .with_detail("the CUDA driver is loaded already; choose its library before anything asks for a GPU"));
    }
    choice.path = Some(path.as_ref().to_owned());
    Ok(())
}

/// The driver's library by the names under which it is installed. The bare name, last on Unix, is
/// also that of a toolkit's stub.
#[cfg(windows)]
const NAMES: [&str; 1] = ["nvcuda.dll"];
#[cfg(not(windows))]
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// Opens the driver's library: the one that was chosen, else one that the process has loaded
/// already, else the one that the system finds.
///
/// A loaded library comes before an installed one, because two drivers in one process do not know
/// each other's handles.
pub(crate) fn open() -> std::result::Result<Library, Unavailable> {
    let mut choice = CHOICE.lock();
    let named = || env::var_os(VARIABLE).filter(|name| !name.is_empty()).map(PathBuf::from);
    let library = match choice.path.clone().or_else(named) {
        Some(path) => open_chosen(&path),
        None => open_installed(),
    }?;
    choice.is_open = true;
    Ok(library)
}

fn open_chosen(path: &Path) -> std::result::Result<Library, Unavailable> {
    // SAFETY: the caller that chose it vouches for a CUDA driver, whose initialisation is sound on
    // any thread.
    unsafe { Library::new(path) }.map_err(|error| {
        let name = path.display().to_string();
        Unavailable::NoDriver { reason: format!("{} (the library that was chosen)", reason(&name, &error)) }
    })
}

fn open_installed() -> std::result::Result<Library, Unavailable> {
    if let Some(library) = NAMES.iter().rev().find_map(|name| loaded(name)) {
        return Ok(library);
    }
    let mut reasons = Vec::new();
    for name in NAMES {
        // SAFETY: the library under this name is the CUDA driver, whose initialisation is sound on
        // any thread.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) => reasons.push(reason(name, &error)),
        }
    }
    Err(Unavailable::NoDriver { reason: reasons.join("; ") })
}

/// Why a library could not be loaded: the answer of the system's loader, which is the innermost
/// source of the error. Most loaders begin it with the library's name.
fn reason(name: &str, error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => reason(name, source),
        None => {
            let text = error.to_string();
            if text.starts_with(name) { text } else { format!("{name}: {text}") }
        }
    }
}

/// The library if the process has loaded it.
#[cfg(target_os = "linux")]
fn loaded(name: &str) -> Option<Library> {
    use libloading::os::unix;
    /// Do not load a library that is not loaded, from `dlfcn.h` of Linux's C libraries.
    const RTLD_NOLOAD: std::ffi::c_int = 4;
    // SAFETY: nothing is loaded, so no initialisation runs.
    unsafe { unix::Library::open(Some(name), unix::RTLD_LAZY | RTLD_NOLOAD) }.ok().map(Library::from)
}

#[cfg(not(target_os = "linux"))]
fn loaded(_name: &str) -> Option<Library> {
    None
}
