//! How a call passes through: the driver's function, and the judge before or after it.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::time::Duration;

use libloading::os::unix::{Library, RTLD_LAZY};
use parking_lot::Mutex;

use crate::findings::Finding;
use crate::judge::{Judge, Scene};
use crate::{report, stack};

pub(crate) const NOT_FOUND: u32 = 500;

/// A pointer of a caller's, through which the driver writes.
pub(crate) type Out<'a> = Option<&'a Cell<u64>>;

/// A function of the driver.
#[derive(Debug)]
pub(crate) struct Next {
    /// With a NUL at its end.
    name: &'static str,
    found: OnceLock<Option<usize>>,
}

impl Next {
    pub(crate) const fn new(name: &'static str) -> Next {
        Next { name, found: OnceLock::new() }
    }

    /// Its address, unless the driver lacks it.
    pub(crate) fn address(&self) -> Option<*const ()> {
        let find = |library: &Library| {
            // SAFETY: only the address is taken.
            let found = unsafe { library.get::<*const ()>(self.name.as_bytes()) };
            found.ok().map(|function| (*function).expose_provenance())
        };
        self.found.get_or_init(|| driver().and_then(find)).map(std::ptr::with_exposed_provenance)
    }
}

/// Questions to the driver, which are asked under the judge's lock.
pub(crate) static ADDRESS_RANGE: Next = Next::new("cuMemGetAddressRange_v2\0");
pub(crate) static PARAMETERS: [Next; 2] = [Next::new("cuFuncGetParamInfo\0"), Next::new("cuKernelGetParamInfo\0")];

/// Looks the questions up, which takes the loader's lock: call it without the judge's.
pub(crate) fn find_questions() {
    PARAMETERS.iter().chain([&ADDRESS_RANGE]).for_each(|question| _ = question.address());
}

/// The driver's library: loaded already, because this library depends on it.
fn driver() -> Option<&'static Library> {
    static DRIVER: OnceLock<Option<Library>> = OnceLock::new();
    let open = || {
        // SAFETY: the library is loaded already, so no initialisation runs.
        let opened = unsafe { Library::open(Some("libaquifer_driver.so"), RTLD_LAZY) };
        opened.inspect_err(|error| eprintln!("aquifer: the CUDA driver cannot be called: {error}")).ok()
    };
    DRIVER.get_or_init(open).as_ref()
}

/// Which stream 0 means in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Legacy,
    PerThread,
}

static JUDGE: Mutex<Option<Judge>> = Mutex::new(None);

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Lets the judge see a call. What goes wrong in here is not the program's fault, which goes on.
fn judged(scene: &mut Scene, what: impl FnOnce(&mut Judge, &mut Scene)) {
    let see = || {
        let mut judge = JUDGE.lock();
        let judge = judge.get_or_insert_default();
        what(judge, scene);
        judge.take_findings()
    };
    let write = |found: Vec<Finding>| found.iter().for_each(|finding| report::write(&finding.row()));
    if catch_unwind(AssertUnwindSafe(|| write(see()))).is_err() {
        report::broken();
    }
}

/// When a call is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    /// After it, if it succeeded.
    Then,
    /// After it: its scene has the code.
    Always,
    /// Before it, because it ends something.
    Ends,
}

/// Passes a call on with `pass`, and judges it with `mean`. A driver might call functions that it
/// exports by name and find those here: such calls are its own.
pub(crate) fn call(
    (when, name, form): (When, &'static str, Form),
    pass: impl Fn() -> u32,
    mean: impl FnOnce(&mut Judge, &mut Scene),
) -> u32 {
    if !report::is_wanted() || INSIDE.replace(true) {
        return pass();
    }
    let mut scene = Scene::new(name, form, stack::here());
    if when == When::Ends {
        judged(&mut scene, mean);
        scene.code = pass();
        if scene.code != 0 {
            judged(&mut scene, Judge::undo_free);
        }
    } else {
        scene.code = pass();
        if when == When::Always || scene.code == 0 {
            judged(&mut scene, mean);
        }
    }
    INSIDE.set(false);
    scene.code
}

/// Asks the judge, where no call holds it up. For the report at the end.
pub(crate) fn with_judge<R>(see: impl FnOnce(&mut Judge) -> R) -> Option<R> {
    let mut judge = JUDGE.try_lock_for(Duration::from_secs(2))?;
    Some(see(judge.get_or_insert_default()))
}
