//! Modules of kernels, and their launches.
//!
//! A module is loaded by the simulated device, which checks its text. A launch runs the host
//! implementation of the kernel of the same name in [`aquifer_kernels`], fed with the arguments
//! that its declaration describes; what it touches is taken from the declaration too. Device code
//! is not run: a kernel that is not of that set can be loaded, and its launch is `NOT_SUPPORTED`.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, c_char, c_void};

use aquifer_device::{Code, Driver as _, KernelArg, RawModule, RawStream};
use aquifer_kernels::Kernel;
use parking_lot::Mutex;

use crate::abi::{
    Answer, Call, Handle, INVALID_PTX, In, LAUNCH_OUT_OF_RESOURCES, NO_BINARY_FOR_GPU, NOT_FOUND, Out,
    UNSUPPORTED_PTX_VERSION, abi, code, needed, offer, string,
};
use crate::process::{Life, Process};
use crate::ptx;

/// First handle of functions.
const FIRST: Handle = 0xF0_0000_0000_0000;

/// Dynamic shared memory of a block that need not be asked for, and most that can be, in bytes.
const SHARED_BYTES: u32 = 48 << 10;
const SHARED_BYTES_MAX: u32 = 227 << 10;

/// Threads of a block.
const THREADS_MAX: i32 = 1024;

/// A kernel of a loaded module.
#[derive(Clone, Copy)]
struct Function {
    module: Handle,
    /// `None` for one that only its device code describes.
    kernel: Option<&'static Kernel>,
    /// Whether the text's parameters have the sizes of the declared ones.
    fits: bool,
    shared_bytes_max: u32,
}

/// Loaded modules, and the functions that were asked for.
#[derive(Default)]
pub(crate) struct Modules(Mutex<Table>);

#[derive(Default)]
struct Table {
    /// The sizes in bytes of each entry's parameters, by module and name.
    loaded: HashMap<Handle, BTreeMap<String, Vec<usize>>>,
    by_name: HashMap<(Handle, String), Handle>,
    functions: HashMap<Handle, Function>,
    created: u64,
}

impl Table {
    /// A function of a module, the same each time.
    fn function(&mut self, module: Handle, name: &str) -> Answer<Handle> {
        let entries = self.loaded.get(&module).ok_or(Code::INVALID_HANDLE)?;
        let sizes = entries.get(name).ok_or(NOT_FOUND)?;
        let key = (module, name.to_owned());
        if let Some(&known) = self.by_name.get(&key) {
            return Ok(known);
        }
        let kernel = aquifer_kernels::find(name);
        let declared = |kernel: &Kernel| kernel.params.iter().map(|param| param.bytes()).eq(sizes.iter().copied());
        let fits = kernel.is_some_and(declared);
        self.created += 1;
        let handle = FIRST + self.created;
        self.functions.insert(handle, Function { module, kernel, fits, shared_bytes_max: SHARED_BYTES });
        self.by_name.insert(key, handle);
        Ok(handle)
    }

    /// Offset and size of a parameter of a function, in bytes.
    fn parameter(&self, function: Handle, index: usize) -> Answer<(usize, usize)> {
        let (module, name) = self.by_name.iter().find(|known| *known.1 == function).ok_or(Code::INVALID_HANDLE)?.0;
        let sizes = self.loaded.get(module).and_then(|entries| entries.get(name)).ok_or(Code::INVALID_HANDLE)?;
        let size = *sizes.get(index).ok_or(Code::INVALID_VALUE)?;
        // Scalars lie at multiples of their size.
        let offset = sizes[..index].iter().fold(0, |end: usize, size| end.next_multiple_of(*size) + size);
        Ok((offset.next_multiple_of(size), size))
    }

    fn unload(&mut self, module: Handle) {
        self.loaded.remove(&module);
        self.by_name.retain(|(of, _), _| *of != module);
        self.functions.retain(|_, function| function.module != module);
    }

    fn get(&mut self, function: Handle) -> Answer<&mut Function> {
        self.functions.get_mut(&function).ok_or(Code::INVALID_HANDLE)
    }
}

/// The shape of a launch, and its stream.
struct Shape {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: Handle,
}

impl Life {
    fn load(&self, out: Out<'_, Handle>, image: &CStr) -> Answer {
        let out = needed(out)?;
        // Compiled code (ELF) and bundles of it are not text; there is none for a simulated device.
        if image.to_bytes().starts_with(b"\x7fELF") || image.to_bytes().starts_with(b"\x50\xed\x55\xba") {
            return Err(NO_BINARY_FOR_GPU);
        }
        let text = image.to_str().map_err(|_| INVALID_PTX)?;
        let header = ptx::Header::parse(text).ok_or(INVALID_PTX)?;
        let claimed = Process::get().environment().map_or(0, |environment| environment.version);
        if header.version > ptx::newest_version(claimed) {
            return Err(UNSUPPORTED_PTX_VERSION);
        }
        let module = self.sim.load_module(text).map_err(code)?.0;
        self.modules.0.lock().loaded.insert(module, header.entries);
        out.write(module);
        Ok(())
    }

    /// # Safety
    /// `params` must point to one pointer for each declared parameter, each to a value of its size.
    unsafe fn launch(&self, function: Handle, shape: &Shape, params: *const *const c_void) -> Answer {
        let Function { module, kernel, fits, shared_bytes_max } = *self.modules.0.lock().get(function)?;
        let kernel = kernel.ok_or(Code::NOT_SUPPORTED)?;
        if !fits {
            return Err(LAUNCH_OUT_OF_RESOURCES);
        }
        if shape.shared_bytes > shared_bytes_max {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: passed on to the caller; the text's parameters have the declared sizes.
        let args = unsafe { arguments(kernel, params) }?;
        // How many multiprocessors there are only matters to the shape, which is the caller's.
        let mut launch = kernel.launch(Some(RawModule(module)), args, 1).map_err(code)?;
        (launch.grid, launch.block, launch.shared_bytes) = (shape.grid, shape.block, shape.shared_bytes);
        // SAFETY: the declaration names what its host implementation touches, and the arguments are
        // of its types.
        unsafe { self.sim.launch(&launch, RawStream(shape.stream)) }.map_err(code)
    }
}

/// Reads the arguments that a kernel declares.
///
/// # Safety
/// As [`Life::launch`].
unsafe fn arguments(kernel: &Kernel, params: *const *const c_void) -> Answer<Vec<KernelArg>> {
    // SAFETY: the caller vouches for one pointer for each parameter.
    let params = unsafe { crate::abi::array(params, kernel.params.len()) }?;
    let read = |(param, pointer): (&aquifer_kernels::KernelParam, &*const c_void)| {
        if pointer.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let mut bytes = [0; 8];
        // SAFETY: not null, and the caller vouches for the parameter's size, which is 8 at most.
        unsafe { std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), bytes.as_mut_ptr(), param.bytes().min(8)) };
        Ok(param.decode(bytes))
    };
    kernel.params.iter().zip(params).map(read).collect()
}

/// Reads a module from memory.
///
/// # Safety
/// `image` must be null or point to text that ends with NUL, or to compiled code.
unsafe fn load(call: &Call, out: Out<'_, Handle>, image: *const c_char) -> Answer {
    let life = call.guarded_life()?;
    if image.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: not null. The headers of compiled code hold zeros, so that ends early enough too.
    life.load(out, unsafe { CStr::from_ptr(image) })
}

abi! {
    /// Loads a module of PTX text: `INVALID_PTX` where it is none, `UNSUPPORTED_PTX_VERSION` where
    /// it is newer than the driver, `NO_BINARY_FOR_GPU` where it is for a newer device, or
    /// compiled.
    2000 cuModuleLoadData(call, module: Out<'_, Handle>, image: *const c_char) {
        // SAFETY: the caller vouches for the image.
        unsafe { load(call, module, image) }
    }

    /// As `cuModuleLoadData`. Options of the compiler change nothing.
    2010 cuModuleLoadDataEx(
        call, module: Out<'_, Handle>, image: *const c_char, _count: u32, _options: *const u32, _values: *const c_void,
    ) {
        // SAFETY: the caller vouches for the image.
        unsafe { load(call, module, image) }
    }

    /// Unloads a module. Its functions are gone; launches still run.
    2000 cuModuleUnload(call, module: Handle) {
        let life = call.guarded_life()?;
        life.sim.unload_module(RawModule(module)).map_err(code)?;
        life.modules.0.lock().unload(module);
        Ok(())
    }

    /// A kernel of a module, by name.
    2000 cuModuleGetFunction(call, function: Out<'_, Handle>, module: Handle, name: *const c_char) {
        let life = call.life()?;
        let out = needed(function)?;
        // SAFETY: the caller vouches for the name.
        let name = unsafe { string(name) }?;
        out.write(life.modules.0.lock().function(module, name)?);
        Ok(())
    }

    /// A fact about a kernel. What only a compiler knows, such as registers, is 0.
    2020 cuFuncGetAttribute(call, value: Out<'_, i32>, attribute: u32, function: Handle) {
        let life = call.life()?;
        let out = needed(value)?;
        let function = *life.modules.0.lock().get(function)?;
        let (major, minor) = life.sim.info().compute_capability;
        let number = match attribute {
            0 => THREADS_MAX,
            6 => i32::try_from(major * 10 + minor).unwrap_or(0),
            8 => i32::try_from(function.shared_bytes_max).unwrap_or(i32::MAX),
            1..10 => 0,
            _ => return Err(Code::INVALID_VALUE),
        };
        out.write(number);
        Ok(())
    }

    /// Where a parameter lies among the others, and its size; `INVALID_VALUE` past the last one.
    12040 cuFuncGetParamInfo(
        call, function: Handle, index: usize, offset: Out<'_, usize>, size: Out<'_, usize>,
    ) {
        let life = call.life()?;
        let out = needed(offset)?;
        let (found, bytes) = life.modules.0.lock().parameter(function, index)?;
        out.write(found);
        offer(size, bytes);
        Ok(())
    }

    /// Sets how much dynamic shared memory a kernel may have; its other attributes cannot be set.
    9000 cuFuncSetAttribute(call, function: Handle, attribute: u32, value: i32) {
        let life = call.life()?;
        let mut modules = life.modules.0.lock();
        let function = modules.get(function)?;
        match (attribute, u32::try_from(value)) {
            (8, Ok(bytes)) if bytes <= SHARED_BYTES_MAX => function.shared_bytes_max = bytes.max(SHARED_BYTES),
            (8, _) => return Err(Code::INVALID_VALUE),
            _ => return Err(Code::NOT_SUPPORTED),
        }
        Ok(())
    }

    /// Enqueues a kernel. Arguments in one buffer (`extra`) are refused.
    4000 cuLaunchKernel(
        call, function: Handle, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared_bytes: u32, stream: Handle, params: *const *const c_void, extra: In<'_, Handle>,
    ) {
        let life = call.life()?;
        if extra.is_some() {
            return Err(Code::NOT_SUPPORTED);
        }
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        // SAFETY: the caller vouches for the arguments.
        unsafe { life.launch(function, &Shape { grid, block, shared_bytes, stream }, params) }
    }
}
