//! Finding the driver's library. It is kept for the life of the process: a driver cannot be
//! unloaded safely.

use std::env;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::error::{Code, DeviceError, Operation, Result};
use crate::fork::Mutex;
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
/// The library is a CUDA driver: its functions have the signatures and do what CUDA documents. If
/// objects are passed to and from cudarc, or other users of CUDA in the process, it knows the
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
/// What is loaded already comes before what is found, because two drivers in one process do not
/// know each other's handles.
pub(super) fn open() -> std::result::Result<Library, Unavailable> {
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
        Unavailable::NoDriver {
            reason: format!("{} (the library that was chosen)", together(&[(&name, first_cause(&error))])),
        }
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
            Err(error) => reasons.push((name, first_cause(&error))),
        }
    }
    Err(Unavailable::NoDriver { reason: together(&reasons) })
}

/// The answer of the system's loader, which is the source of the calling crate's error.
fn first_cause(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), first_cause)
}

/// Why each library could not be loaded. Most loaders begin the reason with the name. Libraries
/// with the same reason share it.
fn together(reasons: &[(&str, String)]) -> String {
    let mut shared: Vec<(String, &str)> = Vec::new();
    for (name, said) in reasons {
        let cause = said.strip_prefix(name).and_then(|said| said.strip_prefix(": ")).unwrap_or(said);
        match shared.last_mut() {
            Some((names, last)) if *last == cause => *names += &format!(" and {name}"),
            _ => shared.push(((*name).to_owned(), cause)),
        }
    }
    let causes: Vec<String> = shared.into_iter().map(|(names, cause)| format!("{names}: {cause}")).collect();
    causes.join("; ")
}

/// The library if the process has loaded it.
#[cfg(target_os = "linux")]
fn loaded(name: &str) -> Option<Library> {
    use libloading::os::unix;
    /// Do not load what is not loaded, from `dlfcn.h` of Linux's C libraries.
    const RTLD_NOLOAD: std::ffi::c_int = 4;
    // SAFETY: nothing is loaded, so no initialisation runs.
    unsafe { unix::Library::open(Some(name), unix::RTLD_LAZY | RTLD_NOLOAD) }.ok().map(Library::from)
}

#[cfg(not(target_os = "linux"))]
fn loaded(_name: &str) -> Option<Library> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_named_once() {
        assert_eq!(together(&[("libcuda.so.1", "libcuda.so.1: cannot open".into())]), "libcuda.so.1: cannot open");
        assert_eq!(together(&[("nvcuda.dll", "not found".into())]), "nvcuda.dll: not found");
    }

    #[test]
    fn a_reason_is_told_once() {
        let [one, two] = ["libcuda.so.1", "libcuda.so"];
        let reasons = |last: &str| [(one, format!("{one}: no such file")), (two, format!("{two}: {last}"))];
        assert_eq!(together(&reasons("no such file")), "libcuda.so.1 and libcuda.so: no such file");
        assert_eq!(together(&reasons("wrong class")), "libcuda.so.1: no such file; libcuda.so: wrong class");
    }
}
