# ruff: noqa: E501 - packed files are one word
"""What the fuzzer found, by what was wrong: files that must be refused with an error, or run.

Models have the mode in which they are run, the draw of their inputs, and the file: ONNX text, or
packed (`tests.fuzz.shrink.unpacked`). Those that are compared must give what others give.
"""

MODELS: dict[str, tuple[str, int, str]] = {
    "perm of a weight that is no permutation": (
        "trace",
        0,
        """<ir_version: 10, opset_import: ["": 21]> g () => (float[n, m] y)
        <float[2, 3] w = {1, 2, 3, 4, 5, 6}> { y = Transpose<perm = [0, 2]>(w) }""",
    ),
    "a Loop with a trip count alone": (
        "compare",
        0,
        """<ir_version: 10, opset_import: ["": 21]> g () => (float[n] y) <int64 count = {3}> {
            y = Loop(count, "") <body = b (int64 i, bool on) => (bool go, float s) {
                go = Identity(on)
                s = Cast<to = 1>(i)
            }>
        }""",
    ),
    "places before the first axis (ONNX's inference reads outside of the shape)": (
        "compare",
        313325689,
        """<ir_version: 10, opset_import: ["": 12]> g (float[2, 3, 4] x, int64[2, 1] i) => (y) {
            y = GatherND <batch_dims = -129> (x, i)
        }""",
    ),
    "places before the first axis, which an open size of -3 gives": (
        "compare",
        313325689,
        """<ir_version: 10, opset_import: ["": 21]> g (float[2, 3, 4] x, int64[2, -3] i) => (y) {
            y = GatherND (x, i)
        }""",
    ),
    "an axis of 33 bits for inference": (
        "compare",
        313325689,
        """<ir_version: 10, opset_import: ["": 21]> g (float[2, 3] x, float[3] s) => (y, m, d) {
            y, m, d = LayerNormalization <axis = 2147483648> (x, s)
        }""",
    ),
    "fewer parts than outputs, given by the caller of a function, for inference": (
        "compare",
        313325689,
        """<ir_version: 10, opset_import: ["": 21, "f": 1]> g (float[6] x) => (y, z) {
            y, z = f.halves <n = 1> (x)
        }
        <domain: "f", opset_import: ["": 21]> halves <n> (x) => (y, z) {
            y, z = Split <num_outputs: int = @n> (x)
        }""",
    ),
    "an input without a type, for inference": (
        "trace",
        313325689,
        """<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 4, "u": 1]>
        g (float[2, 3] x) => (y, e) {
            i = NonZero (x)
            u = u.f (i)
            y = ai.onnx.ml.LabelEncoder <keys_int64s = [1], values_int64s = [2]> (u)
            e = EyeLike (u)
        }
        <domain: "u", opset_import: ["": 1]> f (x) => (y) { y = Max (x) }""",
    ),
    "an equation with a digit, for inference (it has no end)": (
        "trace",
        1181175311,
        """<ir_version: 10, opset_import: ["": 12]> g (float[3] x) => (y) {
            y = Einsum <equation = "y0"> (x)
        }""",
    ),
    "with_any_batch where one batch is open without a name": (
        "trace",
        3960699276,
        """<ir_version: 10, opset_import: ["": 24]> g (float["?", 4] x, int64[1] k) => (y, i) {
            y, i = TopK(x, k)
        }""",
    ),
    "a float6 for an operator that does not take it (XLA aborts)": (
        "compare",
        0,
        """<ir_version: 13, opset_import: ["": 13]> g (float6e2m3[3, 4] x) => (y) {
            y = Hardmax(x)
        }""",
    ),
    "axes that are a scalar, where a normalization is looked for": (
        "trace",
        0,
        "c-qZaPixdb6yM3FZu%6u#3BX7Lp%rz9$EyYw{F*hV7GO*|1V)SnXRE|vP~w-TJa=QJo^Ru0eTV@JP0C)-$B2Jc#%5EY}%~01>p_25SE?E{@#1P`OUod#xTq)9qR0`z`es+%x8bhz%z6G5q-*{W*F^K-`l6$3j;fywf%J54n`(i)}@KhZ94E`n+<w2aG7g&lfcQQ7yOX&2ff(y!@x4;!yx7~;I&B@>r+2rHKR%_{pic>dxu1yEx{)Os;rwWMBqFkeV)d=HVzsOr^q4EL<lyJ4f8Rgt&R2*+GEyO_9YA)5x|Exmk=RaG}y89wzr?U%TdYLVo^BVC@AS_uB3`Vs+Cz%l0tfpYIRNwk668tTdihR;W+;gY5tq0V2uEuNWf>wTtkFhj#$?l<Qu^EoK#Wohzhqi5h0t&Zi~5z!`!(6i>-2#Z41A@6HsRamG*YhJ)wOf7yVK<8~AI-4JCi5fufZMMWLZ4y5Ukt&Mpbg9Lj5#K~G<wD#_Hq)6~$!JQrpfR%OAboU=gWRB5bu7Nu6-5J0wRE@I-Xo|Q#8^7+kTd-{T`G1Tx24RAvP{3uX~S!6U28Um@_^p{}aC&6X`7Y>zy_Fh6GW|bEcUxfY|H*ZUDbtUaOvJ}J-FX<Q+!~rfVQgjL+QTdQeEOk@pTpq79P(?YY@*OqdtkK9Sx08+(1u`-y=+IEhI^pB8pTv3dSDtfSLBxC9vToD}?pep(2J4H?Y%k)%@niBoXS?B+UO|Ku!F$<@xrSeApadWASIu0-Y#oL#GuJ9NyuM)KGXXUQQ2UZo*p;)2#t_Il>NQW>p*}0t*nbrC2e>^?Av{nJ2JTssV!C-^+yPQYO*HijSpS9F|I0`K*?Uy7>mH3$vSq?~iyOZLS8=CEHmypF#lw5c4@AYWh`IkB27QStTO!BnMWGOf@ckoEQ30#Ee=zl|Xf1I6m4G6m)CDnqVx<s?dG{Z&`z)HizjZymdASCY1~IFk8Jc*?;?c!3wl$Ha4FE$-o($BB10C`A&GY`=xd|EF=ggDNEjW$jyqD@al&a=$6|u^`",
    ),
    "a complex number, where a normalization is looked for": (
        "trace",
        0,
        "c-rM!-*4Mg6z+|aHa&D&Fw<1%9wrM3DHGE8A&~l%uAy{o+OAD0QeL7P`<5A}c4A+rDdJDynKz(FlX#fMct8RKLcH-8z#oCMiC-_%B;eYPLsHzeNMEH%i{v!Tb-wf6bI&>Voa0+Or_Z#w=?K?)QHns$e_&Bxuhnc<aDPEc;Y!<co6%6S9e>&6!*4BNdX{JgQgoW4-{Gz$tmba$n(^qmcxS^EFIA1=qUQ#ZyRv+V3O(KqMY&XDrKx%PJAJW3mY<)XwtgKU`KZ`uQn6F9ST>O6>Z=H8%iUPeBjn{1dGBNNy6p6h3cQ>Oyihv7Qu^lI*YB{OKYVRs@Jgijsn89De}ExzjZ5=p)!s7-^_#pS$}?0@RD3zBq~*#)nlh+arRSWIe2_|BLrAWRZcVsZqS=V(Tq61-jiA#d>=X!TfCTkgjG1i4OY~~hm{b%^F3V3*p7-q_HWRfzciF%;2r3R^X`5Rji0~|9YVb)h{+baMTz?Y+r*u5M?Q=Kic!4NCP5F-S_bRM1QOQ-bLpG(TfAW|+12j5<y#X@S)twXE;d4fsBMt~F4MhGdy<rvW4XdZ{hA-G)(|jzoy>ph@-oa{n=M>uhQfXVEaJX%6BH*eKvn-AOzz8n@lXk|Cr_lVzPeRmB<22#w2YmygH6i&4L0`E>zNKy>v_Sm^3NXtxzGno-*H=)8r*I5xL9|)pfy}B(awAoVmaKSxu=8Lf@B9zR_ZUHE3oT$U#eda_bfH!4o|^A{(0o%JV{=r{gnJ_sc8EHPs=Aj;fpMpL1a;NOFDl&fH07k17WTIo;g$^J3{|IY@;3L4sk(A*@t#PsYA7~n|8|zz9+z2q{ge?>1jr1!zN|V%KKiRT-ev@Z#ca0G@`xpFO3ycFOPF@Y_taNW#D%pqxA(nAwlx1b($f6)DgnKaP|X5D)melpAqbfj6EKm`*AZAtw#(b`B4TWPBb1#`E|_Mxr+m`nZuugecf-AApguQkR}BWUg(w5~>Wa!QJ?r4*+gIo_hFPy}6SR3LpyqB?3`8+?P)wb(X4*qB?H$MTE@)qg3wgzM4G5Oa_zq~7iRvpwxQ4^Z=6eg&p&2R#lodsAZ}dBcrrs3Ihp3EbfD3N6-avAD%MH55bo8F)gAYKnk8^AlY6;F4r~zTcn~tHag;65(8z^Ouqak?NA;ebYqSqc@Z&asZRG+}oYCEe_F;QU^t&&SR6~8iI4!KP@J!5u&Eg^kd^n_(hu5p>z=>t$89b$uRbpuMS-W{!1?}2<Y&I1U|R9}YplD)fYX!WqA=KBjM9;X{K!5D%XG@>ne8i4;q^-LmAf>yPdT;pxumSW4>ACJNJ88GY+lql%TQ7DB!62SgAgH4BUOfiu=$$-328rp(o0n>{vG`&cy8$xVT{>QXYbB>`2yDpek<(A-<vYHX={vA|F4v@hsy@H}PzAvlLjc!vCkSeB6<;8uaxW3hfkqnHC>p|6!#EfE8(AR87Ew*0z7sQQ!*jUF_jg9LtHK3pz9F)pE8*9*RQ=^7#1+_N7k+uagkJK0sSwZ>UkD!n<(k<4vae%|R)jIKM`%k$i=okv-R8pej_@VwQ$DSVfj?tMcDB-7|PbS7adWvM9z)x4ko`0X~_##jM$-iUqy?lBxjk)xsh)$&<(`P7G%&Cj1>vH4S_{e7F&|G@XBWv*aF{T&kg1VzLxFfHwVsu3ias11KcrH0OlrffXU7~@uvwqonfyPyHocwEfnkdcv19UYTO8",
    ),
    "a body whose input has an initializer": (
        "compare",
        0,
        """<ir_version: 8, opset_import: ["": 17]> g (seq(float[n]) x) => (seq(float[n]) y) {
            y = SequenceMap (x) <body = b (float[n] i) => (float[n] o) <float[0] i = {}> {
                o = Identity (i)
            }>
        }""",
    ),
    "fewer labels than rows": (
        "trace",
        0,
        """<ir_version: 8, opset_import: ["": 17]> g (float[3, 5] x, int64[1] y) => (float z) {
            z = NegativeLogLikelihoodLoss (x, y)
        }""",
    ),
    "axes of two dimensions": (
        "compare",
        0,
        """<ir_version: 8, opset_import: ["": 17]> g (float[3, 2] x, int64[1, 0] a) => (float[n, m] y) {
            y = ReduceSum (x, a)
        }""",
    ),
    "a cell that is clipped to no number": (
        "compare",
        0,
        """<ir_version: 10, opset_import: ["": 22]>
        g (float[1,3,3] x, float[1,9,3] w, float[1,9,3] r) => (float[1,3,3] h) {
            "", h = GRU <hidden_size = 3, clip = -1.0> (x, w, r)
        }""",
    ),
    "more scan outputs than memory holds": (
        "trace",
        0,
        """<ir_version: 8, opset_import: ["": 17]> g (float[4, 3] x) => (y)
        <int64 count = {2147483649}> {
            y = Loop (count, "") <body = b (int64 i, bool go) => (bool on, s) {
                on = Identity (go)
                s = Relu (x)
            }>
        }""",
    ),
    "a vector that inference would follow for long": (
        "trace",
        2,
        """<ir_version: 11, opset_import: ["": 23]>
        g (float[2, 3, 5] x, float[1099511627775] w) => (float[2, 3, 5] y) {
            z = Relu (x)
            y = Mul (z, w)
        }""",
    ),
    "an Identity without outputs": (
        "trace",
        0,
        "c-rIOvhwEQ<zg&X;_ysK%`3?)spR70Vypm)2r*VFF*~ND2r;H>334zAFgh`odvP!@G}tpRFgQf<162ueadB`k3bAl8aWEw@b1_yrv2Za6hynnNK@9`",
    ),
    "counts of n-grams that are not in the pool": (
        "trace",
        0,
        """<ir_version: 4, opset_import: ["": 9]> g (int32[12] x) => (float[7] y) {
            y = TfIdfVectorizer <mode = "TF", min_gram_length = 2, max_gram_length = 2,
                max_skip_count = 5, ngram_counts = [-8589934591, 0, 4611686018427387904],
                ngram_indexes = [0, 1, 2, 3, 4, 5, 6], pool_int64s = [2, 3, 5, 4, 5, 6, 7, 8, 6, 7]> (x)
        }""",
    ),
    "integers of two bits for an operator that does not take them (XLA aborts)": (
        "compare",
        0,
        """<ir_version: 13, opset_import: ["": 27]>
        g (int2[2, 4, 8] x, float16[4, 1, 4] w) => (float16[2, 4, 8] y, float16[2, 4, 3] s) {
            y, s = CausalConvWithState <activation = "silu"> (x, w)
        }""",
    ),
    "a shape that is a scalar": (
        "trace",
        0,
        """<ir_version: 4, opset_import: ["": 9]> g () => (float[3, 3, 3] y)
        <float[1, 3, 1] x = {1, 2, 3}, int64 s = {8}> { y = Expand (x, s) }""",
    ),
    "a batch of none": (
        "trace",
        1467332779,
        """<ir_version: 14, opset_import: ["": 14]> g (float[0, 3, 4] x) => (y)
        <int64[2] s = {-1, 4}> {
            y = Reshape <allowzero = -4294967296> (x, s)
        }""",
    ),
    "strings from numbers that are known while compiling": (
        "compile",
        0,
        """<ir_version: 10, opset_import: ["": 17, "ai.onnx.ml": 1]> g (int64[4] x) => (y) {
            y = ai.onnx.ml.LabelEncoder <classes_strings = ["a", "b", "c"]> (x)
        }""",
    ),
    "a kernel without elements (XLA's verifier)": (
        "compile",
        0,
        """<ir_version: 8, opset_import: ["": 17]> g (float[1, 1, 4] x) => (y)
        <float[1, 1, 0] w = {}> { y = Conv (x, w) }""",
    ),
    "a body's vector that is too long to follow (ONNX's inference takes all memory)": (
        "trace",
        3721612327,
        """<ir_version: 8, opset_import: ["": 17]>
        g (seq(float[n]) x0, seq(float[n]) x1) => (seq(float[n]) y0) {
            y0 = SequenceMap (x0, x1) <
                body = b (float[n] in0, float[9223372028264841215] in1) => (float[n] out0) {
                    out0 = Add (in0, in1)
                }>
        }""",
    ),
}

FILES: dict[str, tuple[str, dict[str, str]]] = {
    "an .npy that is no array": (
        "weights",
        {
            "w.npz": "c-jl_W@Zs#fB;2?^9&Q}S%54MW&`4KL%qC$%Dnu%)BtZrCJ|=bDq*03kpZqRz?&5;#R!BZKw1N=0svD?4Ji"
        },
    ),
    "a tensor that became a string after its checkpoint": (
        "checkpoints",
        {
            "run/model.onnx": "c-n1~eK6a19LJkT;&;DPFH-F=t%p&^4HMdPUA~{RT86moIF8oULlX6{Fg8lAy+iBFcFa2KR;uQ@Vsulj!$Q8FjD;yfbyO?HJaklPN4DB_x-DD(-QVwfz5jUM>&>tS3mMji<>a&6JYSZp@D+1XU3jl0XJoM3Sx%~$ljOpSOjhTzB9@aR=BQklP*rkfPFjxUUrJ@BBxXt?=4hT%Vv7uQmS;JSVHlB!6KF0CE9AXVU{9)|T<C)CC}@A)MtVMQ#VwB+5-%SBntvYt@`=Th@x2(HFT=e~a_MG;ME|S0gdRxH<9$;i21(qpGrE^9ENv0Fa~+&r-$P3m#(+H*jy;=`<U!y2pcXDkJyKNISy_&P%iFOn^j$K%^Ac)`3#qa32pxCZ2T$kE5qZoM@iK<s>QP4;b2kg@RS!U;>cQprmf=tB2#oWxAo%nZGC2DUZ8yz=tZcXJ!U<Nk_4h5XsWcKnl@|M5uXlxA3x&59`!MR;4Pvz7f#na;kUrOrsljq=77Or9OB<fJz?X4jZSkGGgJk2!TG|?5g7%R?nENmg3<o{*)!hZsAj?Qd++Pi^+#%@qSSZUK8^o3XIW~P(0nZ$=rB?^+WEPDnB&|3QFa5DZYpNPC^N;~QZaNIKR02--`r-2J6!h0}WZoaO(!=BH&}`yi?=MMsFRzLyGiyP5KZs1v`r$Hn1bM-e_^H|+?D-d=W<Hea`SqA?R{}3xGvIGlaX8TrP&xXt{<>m~*tJMd9U>qh!Y<v7xO}oCi-x-2Q!(_&6vXUEfJYaLAY%0<<Zfg`Nkb7Rztc(?cOw?ByHVR@HJ&M*LWiMR;u-c_28D0fp|UT$vBIksHU4!Nw{n#P#7`49=OIYDRoXowsDp6jBph#U1w-S0{is$4HBGmP&YKH@U5li^^AYhZ=Q1LO_n%vmutM%RnSuBePtz}jVtvg7p9+^xVb8;Q5WabXy6+p7&J>)*t!W1w)+@TB+!wKheofwv;nI^%9q8o~pcmEbfz^o)S~2E=4_`P>6N-c~$AKK3^H1Z_-RX<SWuAfUS{ZyY_c?e+rc0y0FN4M91>&9{1%t(_^onvG{g_%XR@><N(<|wLh|~13cO7mXlR~iPDXR4sAn&Flw55n~C3XT{d@@Nyoz^%Ku}g278NjtC4bae)uhW{oq9G|;aL1w#IV*lR>Sc}Dj{Z=3SB|dPQWTay#e^M+kW`-sLos4}y(5IIl=Y*hm57n>mAQ&ErFme<aa;43#XDJRh9kCOEya9AQjRi}<uZ)IoM`?p;RW*8Z6fP`0FjEr*Z"
        },
    ),
}
"""By what was wrong: the kind of the files, and those that differ from `files.write_files`."""
