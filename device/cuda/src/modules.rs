//! Modules of kernels and their launches.

use std::ffi::{CString, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use aquifer_device::{Code, DeviceError, KernelArg, Launch, Operation, RawModule, RawStream, Result};
use cudarc::driver::sys::{CUfunction, CUfunction_attribute as FunctionAttr};

use crate::gpu::Gpu;
use crate::handles::OwnedObject;
use crate::installation::{bad_value, check, check_function};
use crate::objects::{Kernel, Kernels, Modules};
use crate::raw::{handle, pointer};
use crate::streams;

/// Most arguments of a kernel, which are laid out on the stack.
const ARGS_MAX: usize = 64;

/// Shared memory that a kernel may use without asking beforehand, its own variables included, in
/// bytes.
const SHARED_BYTES_PLAIN: u32 = 48 << 10;

const INVALID_PTX: Code = Code(218);

impl Gpu {
    pub(crate) fn load_module(&self, ptx: &str) -> Result<RawModule> {
        let operation = Operation::LoadModule;
        let text = CString::new(ptx).map_err(|_| {
            DeviceError::refused(operation, INVALID_PTX).with_detail("the PTX text has a zero byte in it")
        })?;
        let mut raw = ptr::null_mut();
        self.context
            // SAFETY: handle and text outlive the call, and the text ends with a zero byte (F1).
            .call(operation, |functions| unsafe { (functions.cuModuleLoadData)(&raw mut raw, text.as_ptr().cast()) })
            .map_err(|error| explain(self, error))?;
        let raw = handle(raw);
        // SAFETY: just created, and known only here.
        self.modules.insert(raw, unsafe { OwnedObject::new(&self.context, raw, Kernels::default()) });
        Ok(RawModule(raw))
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// As for [`aquifer_device::Driver::launch`].
    pub(crate) unsafe fn launch(&self, launch: &Launch, stream: RawStream) -> Result<()> {
        let operation = Operation::Launch;
        let stream = streams::live(self, operation, stream)?;
        let Some(module) = launch.module else {
            return Err(DeviceError::refused(operation, Code::NOT_SUPPORTED)
                .with_detail(format!("kernel {} has no device code", launch.name)));
        };
        let module = self.modules.find(operation, module.0)?;
        let kernel: CUfunction = pointer(kernel(self, &module, launch)?);
        let mut cells = cells(&launch.args)?;
        let mut arguments = cells.each_mut().map(|cell| ptr::from_mut(cell).cast::<c_void>());
        let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) = (launch.grid, launch.block);
        let (shared, arguments, extra) = (launch.shared_bytes, arguments.as_mut_ptr(), ptr::null_mut());
        // Relaxed: the first launch may load the kernel.
        let _current = self.context.enter_relaxed(operation)?;
        let call = self.context.functions().cuLaunchKernel;
        // SAFETY: module and stream live, and with the module its kernel (L1, F1); the arguments
        // outlive the call, in which they are copied; the caller vouches that they are those that the
        // kernel expects.
        let code = unsafe {
            call(kernel, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream.raw, arguments, extra)
        };
        check(operation, code).map_err(|error| error.with_more(format!("kernel {}", launch.name)))
    }
}

/// Explains why PTX was refused.
fn explain(gpu: &Gpu, error: DeviceError) -> DeviceError {
    let ((major, minor), (device_major, device_minor)) =
        (gpu.context.installation.version, gpu.info.compute_capability);
    let detail = match error.code.0 {
        222 => {
            format!("the PTX text is newer than this driver, which supports CUDA {major}.{minor}; install a newer one")
        }
        209 => {
            format!("the PTX text is for newer GPUs than this one, of compute capability {device_major}.{device_minor}")
        }
        218 => "the text is no PTX that the driver can compile".to_owned(),
        221 => "the driver's PTX compiler is missing; install the driver again".to_owned(),
        _ => return error,
    };
    error.with_detail(detail)
}

/// The kernel that is to be launched, looked up in the module at its first launch.
fn kernel(gpu: &Gpu, module: &OwnedObject<Modules>, launch: &Launch) -> Result<u64> {
    if let Some(kernel) = module.extra.0.read().get(launch.name)
        && launch.shared_bytes <= kernel.shared_bytes.load(Ordering::Relaxed)
    {
        return Ok(kernel.raw);
    }
    let mut kernels = module.extra.0.write();
    if !kernels.contains_key(launch.name) {
        let raw = look_up(gpu, module, launch.name)?;
        kernels.insert(launch.name, Kernel { raw, shared_bytes: AtomicU32::new(0) });
    }
    let Some(kernel) = kernels.get(launch.name) else { return Err(bad_value(Operation::Launch, launch.name)) };
    if launch.shared_bytes > kernel.shared_bytes.load(Ordering::Relaxed) {
        allow_shared(gpu, kernel, launch)?;
    }
    Ok(kernel.raw)
}

fn look_up(gpu: &Gpu, module: &OwnedObject<Modules>, name: &str) -> Result<u64> {
    let operation = Operation::Launch;
    let c_name = CString::new(name).map_err(|_| {
        DeviceError::refused(operation, Code(500)).with_detail(format!("the module has no kernel {name}"))
    })?;
    let _current = gpu.context.enter_relaxed(operation)?;
    let mut raw = ptr::null_mut();
    let call = gpu.context.functions().cuModuleGetFunction;
    // SAFETY: handle and name outlive the call, and the module lives (L1, F1).
    let code = unsafe { call(&raw mut raw, pointer(module.raw()), c_name.as_ptr()) };
    check_function(operation, "cuModuleGetFunction", code).map_err(|error| {
        if error.code == Code(500) { error.with_detail(format!("the module has no kernel {name}")) } else { error }
    })?;
    Ok(handle(raw))
}

/// Lets a kernel use so much dynamic shared memory. What it may use unasked depends on its own
/// variables.
fn allow_shared(gpu: &Gpu, kernel: &Kernel, launch: &Launch) -> Result<()> {
    let operation = Operation::Launch;
    let set = gpu.context.functions().cuFuncSetAttribute;
    if set.is_some() || launch.shared_bytes > SHARED_BYTES_PLAIN {
        let set = gpu.optional(operation, set)?;
        let asked = || format!("kernel {} with {} bytes of shared memory", launch.name, launch.shared_bytes);
        let bytes = i32::try_from(launch.shared_bytes).map_err(|_| bad_value(operation, asked()))?;
        let _current = gpu.context.enter_relaxed(operation)?;
        let attribute = FunctionAttr::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as c_uint;
        // SAFETY: the kernel lives with its module (L1, F1).
        let code = unsafe { set(pointer(kernel.raw), attribute, bytes) };
        check_function(operation, "cuFuncSetAttribute", code).map_err(|error| error.with_detail(asked()))?;
    }
    kernel.shared_bytes.store(launch.shared_bytes, Ordering::Relaxed);
    Ok(())
}

/// Arguments of a kernel, in order, each with its bytes at the start of a cell; the cells behind
/// them are empty. The machines that CUDA runs on are little-endian, so smaller arguments are the
/// lowest bytes.
fn cells(args: &[KernelArg]) -> Result<[u64; ARGS_MAX]> {
    let mut cells = [0; ARGS_MAX];
    if args.len() > ARGS_MAX {
        let detail = format!("{} arguments; a kernel takes at most {ARGS_MAX}", args.len());
        return Err(bad_value(Operation::Launch, detail));
    }
    for (cell, arg) in cells.iter_mut().zip(args) {
        *cell = match *arg {
            KernelArg::Ptr(ptr) => ptr.0,
            KernelArg::U64(value) => value,
            KernelArg::F64(value) => value.to_bits(),
            KernelArg::U32(value) => value.into(),
            KernelArg::F32(value) => value.to_bits().into(),
        };
    }
    Ok(cells)
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_device::DevicePtr;

    #[test]
    fn arguments_are_packed_at_the_start_of_their_cells() {
        let args = [
            KernelArg::Ptr(DevicePtr(0x1122_3344_5566_7788)),
            KernelArg::U32(7),
            KernelArg::U64(u64::MAX - 1),
            KernelArg::F32(1.5),
            KernelArg::F64(-2.25),
        ];
        let cells = cells(&args).unwrap();
        let first = |index: usize| <[u8; 4]>::try_from(&cells[index].to_ne_bytes()[..4]).unwrap();
        assert_eq!((cells[0], cells[2]), (0x1122_3344_5566_7788, u64::MAX - 1));
        assert_eq!((u32::from_ne_bytes(first(1)), f32::from_ne_bytes(first(3))), (7, 1.5));
        assert_eq!(f64::from_bits(cells[4]), -2.25);
    }

    #[test]
    fn too_many_arguments_are_refused() {
        let error = cells(&[KernelArg::U32(0); ARGS_MAX + 1]).err().unwrap();
        assert_eq!(error.code, Code::INVALID_VALUE);
    }
}
