//! candle's tensors on Aquifer, without a change in candle: on the stand-in driver, where
//! allocations and copies are real and kernels are not.
#![cfg(all(target_os = "linux", feature = "candle"))]

use candle_core::{CudaDevice, DType, Device, Tensor};

#[test]
fn tensors_come_from_aquifer() {
    let standin = aquifer_standin::load().unwrap().add_device("256MiB,seed=3").unwrap();
    let cuda = CudaDevice::new_with_stream(standin.ordinal() as usize).unwrap();
    let memory = aquifer_cudarc_hook::install(cuda.cuda_stream().context()).unwrap();
    let device = Device::Cuda(cuda);
    for step in 0..50_usize {
        let values: Vec<f32> = (0..1 << 12).map(|at| (at + step) as f32).collect();
        let tensor = Tensor::from_vec(values.clone(), (64, 64), &device).unwrap();
        let zeros = Tensor::zeros((64, 64), DType::F32, &device).unwrap();
        assert_eq!(tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap(), values);
        assert_eq!(zeros.to_vec2::<f32>().unwrap()[3][4], 0.0);
        let again = tensor.to_device(&Device::Cpu).unwrap().to_device(&device).unwrap();
        assert_eq!(again.dims(), [64, 64]);
    }
    let served = memory.stats().allocation.all.allocated;
    assert!(served >= 150, "{served} allocations");
    assert_eq!(memory.memory_allocated(), 0);
    assert_eq!(standin.calls("cuMemAllocAsync").unwrap(), 0);
    assert_eq!(standin.violations(), Vec::<String>::new());
}
