//! Names types of both, so that both are compiled and linked into one program; see Cargo.toml.

use cudarc::driver::CudaContext;
use forebay::device::Device;

fn main() {
    println!("{} {}", std::any::type_name::<CudaContext>(), std::any::type_name::<dyn Device>());
}
